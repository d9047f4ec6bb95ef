"""Six broken trainings and the same six mended: the doctor names the trouble and the layer, and is silent otherwise."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from autoprec.cli import main
from autoprec.doctor import diagnose, examine
from autoprec.policy import Policy
from autoprec.tasks.loading import load_function

SYMPTOMS = Path(__file__).parents[2] / "examples" / "symptoms"
TROUBLES = {
    "overflow": ("overflow", "1.feed_forward.2"),
    "vanishing": ("underflow", "4"),
    "batchnorm": ("poisoned statistics", "1"),
    "clipping": ("clipped before unscale_", ""),
    "half_loss": ("loss in half", ""),
    "half_parameters": ("half parameters", "0"),
}
"""File -> what is wrong and where; "" is the loop or the loss, which belong to no layer."""


def test_there_is_one_file_for_each_trouble() -> None:
    assert {path.stem for path in SYMPTOMS.glob("*.py")} == set(TROUBLES)


@pytest.mark.parametrize("name", TROUBLES)
def test_the_trouble_and_its_layer_are_named(name: str) -> None:
    findings = diagnose(examine(load_function(f"{SYMPTOMS}/{name}.py:broken")))
    assert TROUBLES[name] in [(finding.name, finding.unit) for finding in findings if finding.is_wrong]
    assert all(finding.seen and finding.why and finding.change for finding in findings)


@pytest.mark.parametrize("name", TROUBLES)
def test_nothing_is_found_in_the_mended_training(name: str) -> None:
    seen = examine(load_function(f"{SYMPTOMS}/{name}.py:sound"))
    assert seen.num_steps == 12
    assert diagnose(seen) == []


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["autoprec", "doctor", "--device", "cpu", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def test_the_command_says_what_was_seen_why_and_what_to_change_and_exits_with_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "--task", f"{SYMPTOMS}/overflow.py:broken") == 1
    text = capsys.readouterr().out
    for words in ("WRONG: overflow in 1.feed_forward.2", "seen", "why", "change", "12 tried, 12 skipped"):
        assert words in text, words
    assert run(monkeypatch, "--task", f"{SYMPTOMS}/overflow.py:sound", "--format", "json", "--num-steps", "3") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["findings"] == []
    assert document["facts"]["steps"] == "3 tried, 0 skipped by the grad scaler"


def test_a_task_by_name_is_trained_under_stock_autocast_and_a_policy_where_one_is_given(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run(monkeypatch, "--model", "mlp", "--num-steps", "3") == 0
    assert "loss scale" in capsys.readouterr().out
    Policy(default="fp32").save(tmp_path / "policy.json")
    assert run(monkeypatch, "--model", "mlp", "--num-steps", "3", "--policy", str(tmp_path / "policy.json")) == 0
    assert "note: nothing in half" in capsys.readouterr().out


MARKUP = """
import torch
from torch import nn

def train():
    model = nn.ModuleDict({"[red]<script>": nn.Linear(8, 8)}).half()
    layer = model["[red]<script>"]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    print("the training's own words")
    for _ in range(3):
        model(torch.randn(4, 8)) if False else layer(torch.randn(4, 8).half()).float().sum().backward()
        optimizer.step()

def nothing():
    print("no training")

def raising():
    raise KeyError("[red]")
"""


def test_names_cannot_style_the_terminal_and_own_prints_stay_out_of_the_result(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(MARKUP)
    assert run(monkeypatch, "--task", f"{tmp_path}/mine.py:train") == 1
    streams = capsys.readouterr()
    assert "half parameters" in streams.out
    assert "own words" in streams.err
    assert run(monkeypatch, "--task", f"{tmp_path}/mine.py:nothing") == 2
    assert "trained nothing" in capsys.readouterr().err
    assert run(monkeypatch, "--task", f"{tmp_path}/mine.py:raising") == 2
    assert "KeyError: '[red]'" in capsys.readouterr().err
