"""The help and the errors of every command, word for word: `python tests/cli/test_golden.py` writes them anew.

A line of `golden/<command>.txt` that starts with `$` is a command line; its exit code and what it printed follow. White
space is folded: how wide a terminal is does not matter.
"""

from __future__ import annotations

import contextlib
import io
import shlex
import sys
import warnings
from pathlib import Path

import pytest

from autoprec.cli import main
from autoprec.cli.app import COMMANDS

GOLDEN = Path(__file__).parent / "golden"
PROGRAM = "autoprec"
POLICY = '{"schema_version": 1, "modules": {"layer9": "fp16"}}'

ERRORS = {
    "autoprec": ["serach", "--verbos", "-v -q diff a b"],
    "search": ["--modle mlp", "--model resnet5", "--n-trials 0", "--format jsn", "--memory-budget 12", "--gpu a1000"],
    "worker": ["", "--storage x.db --study-name s", "--storage sqlite:///x.db --study-name s --n-trials 0"],
    "verify": ["", "nowhere.json", "bad.json", "--max-seeds x nowhere.json"],
    "choose": ["", "nowhere", "nowhere --memory-budget 0GB"],
    "show": ["", "nowhere.json", "bad.json", "policy.json --schema", "policy.json --format xml"],
    "report": ["", "nowhere", ". --png"],
    "dashboard": ["", "nowhere", ". --port 0"],
    "diff": ["policy.json", "policy.json nowhere.json"],
    "check": ["", "nowhere.json --model mlp", "policy.json --model mpl", "policy.json --model mlp"],
    "export": ["policy.json", "policy.json --to deepsped", "nowhere.json --to onnx",
               "policy.json --to deepspeed --zero-stage 4", "policy.json --to fsdp2 --model mpl",
               "policy.json --to lightning -o nowhere/x.yaml"],
    "estimate": ["--model resnet5", "--gpu v10 --model mlp", "--memory-budget 12 --model mlp", "--batch-size 0"],
    "doctor": ["--task nowhere.py:train", "--task task", "--num-steps 1", "--task mine.py:nothing --model mlp",
               "nowhere.py -- --epochs 1"],
    "spaces": ["cn"],
    "init": ["visoin"],
}  # fmt: skip
"""Command -> arguments that are wrong, run in a folder that holds policy.json and the broken bad.json."""


def commands() -> list[str]:
    return [PROGRAM, *COMMANDS]


def answers(command: str) -> str:
    """Run a command's help and its errors in this process; return what each printed."""
    lines = []
    for arguments in ("--help", *ERRORS.get(command, [])):
        line = f"{PROGRAM} {'' if command == PROGRAM else command + ' '}{arguments}".strip()
        lines += [f"$ {line}", *_answer(shlex.split(line)), ""]
    return "\n".join(lines)


def _answer(line: list[str]) -> list[str]:
    out, err = io.StringIO(), io.StringIO()
    before, sys.argv = sys.argv, line
    code: object = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            main()
        except SystemExit as ended:
            code = ended.code or 0
        finally:
            sys.argv = before
    printed = [" ".join(text.split()) for text in (out.getvalue() + err.getvalue()).splitlines()]
    return [f"exit {code}", *(text for text in printed if text)]


def folded(text: str) -> list[str]:
    """Return the answers as one line each: help is wrapped to the width of the terminal."""
    return [" ".join(part.split()) for part in ("\n" + text).split("\n$ ") if part.strip()]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    prepare(tmp_path)


def prepare(folder: Path) -> None:
    (folder / "policy.json").write_text(POLICY)
    (folder / "bad.json").write_text('{"modlues": {}}')


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("command", commands())
def test_help_and_errors_are_as_they_were_written_down(command: str) -> None:
    golden = GOLDEN / f"{command}.txt"
    assert golden.exists(), f"no golden text of {command}: give it errors above and run python {Path(__file__).name}"
    assert folded(answers(command)) == folded(golden.read_text())


@pytest.mark.parametrize("command", commands())
def test_every_command_has_errors_and_they_are_exit_2_or_4_for_a_policy_that_does_not_fit(command: str) -> None:
    entries = folded((GOLDEN / f"{command}.txt").read_text())[1:]
    assert len(entries) == len(ERRORS[command]) >= 1
    for entry in entries:
        assert ("exit 4" if "does not fit" in entry else "exit 2") in entry


if __name__ == "__main__":
    import os
    import tempfile

    os.environ["COLUMNS"] = "100"
    GOLDEN.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as place:
        os.chdir(place)
        prepare(Path(place))
        for each in commands():
            (GOLDEN / f"{each}.txt").write_text(answers(each))
