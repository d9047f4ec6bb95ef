"""`--task` and `init`: a training of one's own on the command line."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
import torch

from autoprec.cli import main
from autoprec.cli.init import SUMMARIES, starters
from autoprec.policy import Policy
from autoprec.tasks.source import resolve_task
from autoprec.trials import TrialSettings, run_trial
from autoprec.trials.checking import check_task

WRONG = """
import autoprec
def task():
    return autoprec.Task(name="mine", model=build, train_batches=[], eval_batches=[], loss=None)
def build():
    return undefined_name
"""


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["autoprec", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--task", "mine.py:task", "--model", "resnet18"], "--model: not with --task"),
        (["--data", "digits", "--task", "mine.py:task", "--image-size", "8"], "--data, --image-size: not with --task"),
        (["--task", "none.py:task"], "task file 'none.py': there is no such file"),
        (["--task", "mine.py"], "path/to/file.py:function or package.module:function is needed"),
        (["--task", "mine.py:tusk"], "mine.py has no function 'tusk'; nearest: task"),
        (["--task", "mine.py:task"], "task 'mine': train_batches: there are 0 batches (an empty list)"),
    ],
    ids=["a model", "two options", "no file", "no function", "nearest", "a wrong task"],
)
@pytest.mark.parametrize("command", ["search", "verify"])
def test_a_wrong_task_is_one_line_and_exit_2_and_nothing_is_written(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    command: str,
    arguments: list[str],
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(WRONG)
    Policy(default="fp32").save(Path("policy.json"))
    policy = ["policy.json"] if command == "verify" else []
    assert run(monkeypatch, command, *policy, *arguments) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1
    assert not Path("runs").exists()


@pytest.mark.parametrize("verbose", [["-v", "search"], ["search", "-v"]], ids=["before", "after"])
def test_verbose_shows_the_users_own_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, verbose: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(WRONG.replace("[]", "[__import__('torch').zeros(2, 3)]"))
    assert run(monkeypatch, "search", "--task", "mine.py:task") == 2
    assert capsys.readouterr().err == (
        "autoprec: task 'mine': model() raised NameError: name 'undefined_name' is not defined\n"
    )
    assert run(monkeypatch, *verbose, "--task", "mine.py:task") == 2
    error = capsys.readouterr().err
    assert "return undefined_name" in error
    assert "NameError: name 'undefined_name' is not defined" in error


def test_every_starting_file_is_there() -> None:
    assert set(starters()) == set(SUMMARIES)


@pytest.mark.parametrize("kind", SUMMARIES)
def test_a_starting_file_runs_as_it_stands_and_is_not_written_over(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, kind: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(monkeypatch, "init", kind, "-o", "mine.py") == 0
    assert capsys.readouterr().out == "written: mine.py; try it: autoprec search --task mine.py:task --n-trials 4\n"
    text = Path("mine.py").read_text()
    assert f"{kind}.py" not in text
    assert "--task mine.py:task" in text
    task = resolve_task("mine.py:task")
    settings = TrialSettings(warmup_steps=1, measured_steps=9, batchnorm_batches=1)
    assert check_task(task, settings, num_steps=10) == []
    outcome = run_trial(task, Policy(default="autocast", dtype="fp16"), settings)
    assert outcome.is_ok, outcome.message
    assert outcome.train_losses[-1] < outcome.train_losses[0]
    assert run(monkeypatch, "init", kind, "-o", "mine.py") == 2
    assert "mine.py is there already and is not written over" in capsys.readouterr().err
    assert Path("mine.py").read_text() == text


@pytest.mark.parametrize("with_policy", [True, False], ids=["policy", "fp32"])
def test_the_loop_of_ones_own_trains_under_a_policy(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, with_policy: bool
) -> None:
    path = tmp_path / "policy.json"
    Policy(default="autocast", dtype="bf16", modules={"4": "fp32"}).save(path)
    torch.manual_seed(0)
    runpy.run_path(str(starters()["loop"]))["main"](path if with_policy else None)
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("epoch 3: loss ")
    assert float(last.rpartition(" ")[2]) > 0.9


@pytest.mark.slow
@pytest.mark.parametrize("kind", SUMMARIES)
def test_a_starting_file_is_searched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(monkeypatch, "init", kind) == 0
    assert run(monkeypatch, "search", "--task", f"{kind}.py:task", "--n-trials", "4", "-o", "out") in (0, 3)
    assert (tmp_path / "out" / "policy.json").exists()


def test_a_kind_that_does_not_exist_names_the_nearest(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(monkeypatch, "init", "visoin") == 2
    assert "init 'visoin'; allowed: loop, text, vision; nearest: vision" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
