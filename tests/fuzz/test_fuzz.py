"""Every command on a few hostile inputs: an exit code, one line, valid JSON, no secret, soon. `make fuzz` goes on."""

from __future__ import annotations

import warnings

import pytest
from fuzzing import CALLS, SECRET, Call, explore, problem_of


@pytest.mark.parametrize("command", CALLS)
def test_hostile_inputs_end_in_good_order(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", [])  # put back at the end

    def check(call: Call) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # those of the program are lines on stderr
            assert problem_of(call) is None, call

    explore(command, num_examples=12, number=0, check=check)


@pytest.mark.parametrize("call", [Call(("show", "{a}"), {"a": b'{"modules": {"hunter2secret": "fp32"}}'})])
def test_what_must_not_be_is_found(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fuzzer that finds nothing must be able to: here a secret that is really printed."""
    monkeypatch.setattr("sys.argv", [])
    assert SECRET in str(problem_of(call))
