"""The report of a small stored study: what it holds, that names do no harm, and how Chromium takes it."""

from __future__ import annotations

import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from chromium import find_chromium, open_chromium
from stored_study import CLOSING, IMAGE, MARKUP, SCRIPT

from autoprec.cli import main
from autoprec.errors import StudyError, UsageError
from autoprec.report.extras import require_extra
from autoprec.report.saved_search import SavedSearch, load_search

pytest.importorskip("plotly", reason="autoprec[report] is not installed")

from autoprec.report.html import ReportFigure, report_figures, report_html

MAX_BYTES = 8_000_000
NAMES = {
    *("front-memory", "front-throughput", "proof", "map-precision", "map-sensitivity", "map-policies", "exponents"),
    *("exponents-activations", "exponents-gradients", "loss-curves", "loss-differences", "scale-history", "memory"),
    *("time", "importance"),
}


class Elements(HTMLParser):
    """Collects elements with their attributes, and the text outside scripts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text, self._raw = "", False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._raw = tag in ("script", "style")

    def handle_endtag(self, tag: str) -> None:
        self._raw = False

    def handle_data(self, data: str) -> None:
        self.text += "" if self._raw else data


@pytest.fixture(scope="module")
def search(stored_folder: Path) -> SavedSearch:
    return load_search(stored_folder)


@pytest.fixture(scope="module")
def page(search: SavedSearch) -> str:
    return report_html(search)


@pytest.fixture(scope="module")
def figures(search: SavedSearch) -> dict[str, ReportFigure]:
    return {figure.name: figure for figure in report_figures(search)}


def test_the_page_holds_all_figures_and_stays_small(page: str) -> None:
    data = re.search(r'<script type="application/json" id="figures">(.*?)</script>', page, re.DOTALL)
    assert data is not None
    assert set(json.loads(data[1])) == NAMES
    assert len(page.encode()) < MAX_BYTES


def test_every_trial_stands_there_with_its_kind_of_end(page: str) -> None:
    rows = re.findall(r'<span class="end [a-z]+">(.*?)</span>', page)
    assert rows == ["ok", "ok", "ok", "ok", "non_finite_loss", "stopped"]


def test_names_and_messages_are_text(page: str) -> None:
    parsed = Elements(page)
    tags = [tag for tag, _ in parsed.elements]
    assert tags.count("script") == 3  # the figures' data, plotly, the page's own
    assert "img" not in tags
    assert not [name for _, attributes in parsed.elements for name in attributes if name.startswith("on")]
    for harmful in (SCRIPT, IMAGE, MARKUP, CLOSING):
        assert harmful in parsed.text


def test_names_in_figures_are_text(figures: dict[str, ReportFigure]) -> None:
    labels = figures["map-precision"].figure.data[0].labels
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in labels
    for name, found in figures.items():
        drawn = found.figure.to_dict()
        for trace in drawn["data"]:
            trace.pop("ids", None)  # treemaps never show these
            trace.pop("parents", None)
        assert not re.search("<(script|img|b)[ >]", json.dumps(drawn)), name


def test_nothing_is_loaded_from_elsewhere(page: str) -> None:
    links = [attributes.get(key) or "" for _, attributes in Elements(page).elements for key in ("src", "href")]
    assert [link for link in links if link and not link.startswith(("#", "data:"))] == []
    assert "default-src 'none'" in page


def test_gradients_are_moved_by_the_loss_scale_of_the_policy(figures: dict[str, ReportFigure]) -> None:
    by_name = {trace.name: trace for trace in figures["exponents"].figure.data}
    assert by_name["gradients"].x == (-30, -20)
    assert by_name["gradients times 1024"].x == (-20, -10)
    assert by_name["gradients times 1024"].y == (0.25, 0.75)
    assert by_name["activations"].y == (0.75, 0.25)


def test_loss_curves_are_means_with_bands_over_the_seeds(figures: dict[str, ReportFigure]) -> None:
    by_name = {trace.name: trace for trace in figures["loss-curves"].figure.data if trace.name}
    assert by_name["fp32, 2 seeds"].y == pytest.approx([2.1, 2.0, 1.9, 1.8, 1.7])
    difference = {trace.name: trace for trace in figures["loss-differences"].figure.data if trace.name}
    assert difference["trial 3, 2 seeds"].y == pytest.approx([0.01] * 5)
    band = next(trace for trace in figures["loss-curves"].figure.data if trace.fill == "toself")
    assert band.y[:5] == pytest.approx([2.2, 2.1, 2.0, 1.9, 1.8])


def test_memory_stands_by_category_fp32_first_and_then_the_recommendation(figures: dict[str, ReportFigure]) -> None:
    bars = {bar.name: bar for bar in figures["memory"].figure.data}
    assert bars["activations"].y[:2] == ("fp32", "trial 3")
    assert bars["activations"].x[:2] == (3.0, 1.0)


def test_time_is_that_of_the_parts_and_what_lies_between(figures: dict[str, ReportFigure]) -> None:
    bars = {bar.name: dict(zip(bar.y, bar.x, strict=True)) for bar in figures["time"].figure.data}
    assert bars["fp32"]["between the units"] == pytest.approx(1.0)
    assert bars["recommended"][MARKUP] == pytest.approx(2.0)  # autocast
    assert bars["recommended"]["stem"] == pytest.approx(4.0)  # kept in fp32


def test_skipped_steps_are_marked_where_they_were(figures: dict[str, ReportFigure]) -> None:
    skipped = next(t for t in figures["scale-history"].figure.data if t.name == "trial 3, skipped")
    assert (skipped.x, skipped.y) == ((1,), (16.0,))


def test_the_map_has_the_precision_of_each_unit(search: SavedSearch) -> None:
    expected = {"stem": "fp32", f"blocks.{SCRIPT}": "fp16", f"blocks.{IMAGE}": "autocast", MARKUP: "autocast"}
    assert search.precisions(search.policy) == expected


def test_without_a_profile_the_page_says_what_is_missing(own_folder: Path) -> None:
    (own_folder / "profile.json").unlink()
    text = Elements(report_html(load_search(own_folder))).text
    assert "No profile was kept." in text


@pytest.mark.parametrize(
    ("missing", "message"),
    [("front.json", "holds no front.json"), ("study.db", "holds no study.db")],
)
def test_a_folder_that_lacks_a_file_is_refused_by_its_name(own_folder: Path, missing: str, message: str) -> None:
    (own_folder / missing).unlink()
    with pytest.raises(UsageError, match=message):
        load_search(own_folder)
    assert not (own_folder / missing).exists()


def test_a_storage_without_the_study_is_said(own_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(StudyError, match="holds no study 'tiny-0123456789'"):
        load_search(own_folder, storage=f"sqlite:///{tmp_path / 'other.db'}")


def test_a_missing_extra_names_what_to_install() -> None:
    with pytest.raises(
        UsageError, match=r"not_there is not installed; install it with: pip install 'autoprec\[report\]'"
    ):
        require_extra("report", "json", "not_there")


def test_the_command_writes_into_the_folder(
    own_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["autoprec", "report", str(own_folder)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    assert f"written: {own_folder / 'report.html'}" in capsys.readouterr().out
    assert (own_folder / "report.html").read_text().startswith("<!doctype html>")


def test_pngs_without_a_browser_say_what_is_needed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("kaleido", reason="autoprec[report] is not installed")
    from autoprec.report.images import write_images

    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("BROWSER_PATH", raising=False)
    with pytest.raises(UsageError, match="drawn by Chromium or Chrome, and none is found"):
        write_images([], tmp_path)


@pytest.fixture
def chromium_program() -> str:
    program = find_chromium()
    if program is None:
        pytest.skip("no Chromium here: apt-get install chromium-headless-shell")
    return program


def test_chromium_draws_every_figure_without_an_error_or_a_request(
    page: str, tmp_path: Path, chromium_program: str
) -> None:
    """Takes seconds: a browser starts and draws 15 figures; nothing less shows that the page works."""
    path = tmp_path / "report.html"
    path.write_text(page)
    with open_chromium(chromium_program, tmp_path / "profile") as browser:
        browser.open(path)
        browser.wait_for("document.documentElement.dataset.drawn")
        drawn = browser.evaluate(
            "Array.from(document.querySelectorAll('[data-figure]')).filter((place) => place.querySelector('.main-svg'))"
            ".map((place) => place.dataset.figure)"
        )
        shown = browser.evaluate("document.getElementById('figure-map-precision').textContent")
        overflow = browser.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    assert set(drawn) == NAMES
    assert SCRIPT in shown
    assert overflow <= 0
    assert browser.errors == []
    assert [url for url in browser.requests if not url.startswith(("data:", "blob:"))] == [path.as_uri()]


@pytest.mark.slow
def test_chromium_draws_the_report_of_a_resnet50_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chromium_program: str
) -> None:
    """Takes minutes: a whole search of 8 trials with its proof."""
    folder = tmp_path / "resnet50"
    for command in (["search", "--model", "resnet50", "--n-trials", "8", "-o", str(folder)], ["report", str(folder)]):
        monkeypatch.setattr(sys, "argv", ["autoprec", *command])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code in (None, 0, 3)  # 3: the proof was open; the report says so
    path = folder / "report.html"
    assert path.stat().st_size < MAX_BYTES
    with open_chromium(chromium_program, tmp_path / "profile") as browser:
        browser.open(path)
        browser.wait_for("document.documentElement.dataset.drawn")
        drawn = browser.evaluate(
            "Array.from(document.querySelectorAll('.js-plotly-plot')).map((p) => p.dataset.figure)"
        )
    assert set(drawn) == NAMES
    assert browser.errors == []
    assert [url for url in browser.requests if not url.startswith(("data:", "blob:"))] == [path.as_uri()]
