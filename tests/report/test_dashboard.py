"""The study as optuna-dashboard's own API gives it: named objectives, notes, the policy as an artifact."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from wsgiref.util import setup_testing_defaults

import pytest
from stored_study import CLOSING, IMAGE, MARKUP, SCRIPT

pytest.importorskip("optuna_dashboard", reason="autoprec[dashboard] is not installed")

from optuna_dashboard import get_note, save_note

from autoprec.cli import main
from autoprec.policy import Policy
from autoprec.report import dashboard
from autoprec.report.saved_search import load_search


def get(app: Any, path: str) -> bytes:
    """Ask a WSGI application for a path."""
    status: list[str] = []
    environ: dict[str, Any] = {}
    setup_testing_defaults(environ)
    environ.update(REQUEST_METHOD="GET", PATH_INFO=path)
    answer = app(environ, lambda code, headers, *rest: status.append(code))
    body = b"".join(answer)
    if hasattr(answer, "close"):
        answer.close()
    assert status == ["200 OK"], (path, status, body[:200])
    return body


@pytest.fixture
def app(own_folder: Path) -> Any:
    search = load_search(own_folder)
    assert dashboard.annotate_study(search) == 7  # the study, three baselines, trial 3, two that did not end well
    return dashboard.dashboard_app(search)


def test_the_api_has_names_notes_and_the_policy(app: Any, own_folder: Path) -> None:
    detail = json.loads(get(app, "/api/studies/1"))
    assert detail["objective_names"] == ["peak_memory_bytes", "throughput_samples_per_second", "accuracy"]
    notes = {trial["number"]: trial["note"]["body"] for trial in detail["trials"]}
    assert notes[0].startswith("Baseline: fp32.")
    assert notes[3].startswith("**Recommended.** Use the found policy (trial 3)")
    assert "Ended in **non\\_finite\\_loss**" in notes[4]
    assert (
        "| trial 3 | 2.00 GiB 0.50x (computed) | 200/s 2.00x (predicted) | 0.7900 (emulated) | proved |"
        in (detail["note"]["body"])
    )
    artifact = detail["artifacts"][0]
    assert artifact["filename"] == "policy.json"
    assert get(app, f"/artifacts/1/{artifact['artifact_id']}") == (own_folder / "policy.json").read_bytes()


def test_names_in_notes_are_text(app: Any) -> None:
    detail = json.loads(get(app, "/api/studies/1"))
    bodies = [detail["note"]["body"], *(trial["note"]["body"] for trial in detail["trials"])]
    for body in bodies:
        assert "<" not in body
    for harmful in (SCRIPT, IMAGE, MARKUP, CLOSING):
        assert any(dashboard.as_text(harmful) in body for body in bodies)
    assert dashboard.as_text("[a](b) `c`") == "\\[a\\](b) \\`c\\`"


def test_again_writes_nothing_and_another_policy_is_attached_once(own_folder: Path) -> None:
    search = load_search(own_folder)
    dashboard.annotate_study(search)
    assert dashboard.annotate_study(search) == 0
    assert len(list((own_folder / "artifacts").iterdir())) == 1
    Policy(default="fp32").save(own_folder / "policy.json")
    for _ in range(2):
        dashboard.annotate_study(search)
    assert len(list((own_folder / "artifacts").iterdir())) == 2


def test_a_note_of_somebody_else_stays(own_folder: Path) -> None:
    search = load_search(own_folder)
    save_note(search.study, "mine")
    assert dashboard.annotate_study(search) == 6
    assert get_note(search.study) == "mine"


def test_the_command_serves_on_this_machine_alone(
    own_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(dashboard, "run_server", lambda storage, **how: asked.append(how))
    monkeypatch.setattr(sys, "argv", ["autoprec", "dashboard", str(own_folder), "--port", "8123"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    assert [(how["host"], how["port"]) for how in asked] == [("127.0.0.1", 8123)]
    assert "http://127.0.0.1:8123/" in capsys.readouterr().out


def test_a_port_that_is_taken_is_a_usage_error(
    own_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(storage: object, **how: object) -> None:
        raise OSError(98, "Address already in use")

    monkeypatch.setattr(dashboard, "run_server", refuse)
    monkeypatch.setattr(sys, "argv", ["autoprec", "dashboard", str(own_folder)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "port 8080 of 127.0.0.1: Address already in use; give another --port" in capsys.readouterr().err
