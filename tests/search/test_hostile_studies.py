"""Studies, spaces and settings that somebody else has written into: one clear line before or instead of a result."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import optuna
import pytest

from autoprec.errors import StudyError, TaskError, UsageError
from autoprec.search.fingerprint import study_identity
from autoprec.search.space import load_space
from autoprec.search.study import read_record

GOOD = {"policy_key": "k", "policy": {"default": "fp32"}, "outcome": {"kind": "ok"}}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"outcome": {"kind": "splendid"}}, "trial 0 of the study: outcome.kind is not of this autoprec"),
        ({"outcome": {"train_losses": "many"}}, "outcome"),
        ({"outcome": "ok"}, "trial 0"),
        ({"outcome": None}, "trial 0"),
        ({"policy": {"default": "fp99"}}, "fp99"),
        ({"policy": 3}, "trial 0"),
        ({"policy_key": None, "policy": None}, "trial 0"),
        ({"holder": "me"}, "trial 0"),
    ],
    ids=["kind", "field", "text", "none", "policy", "number", "nothing", "holder"],
)
def test_a_broken_trial_is_one_line(changes: dict[str, Any], words: str) -> None:
    trial = optuna.trial.create_trial(values=[0.0, 0.0, 0.0], user_attrs=GOOD | changes)
    trial.number = 0
    with pytest.raises(StudyError, match=words) as caught:
        read_record(trial)
    assert "\n" not in str(caught.value)


def test_a_good_trial_is_read() -> None:
    trial = optuna.trial.create_trial(values=[0.0, 0.0, 0.0], user_attrs=GOOD)
    trial.number = 0
    assert read_record(trial).policy.default == "fp32"


SPACES = {
    "deep nesting": (b"name = " + b"[" * 100_000, "nested too deep"),
    "deep tables": (b"name = 'x'\n" + b".".join([b"a"] * 50_000) + b" = 1", "nested too deep|unknown key"),
    "digits": (b"name = " + b"9" * 5_000, "not TOML"),
    "digits of a range": (
        b"name = 'x'\n[grad_scaler]\ninit_scale = {choices = [" + b"9" * 4_000 + b"]}",
        "too large|init_scale",
    ),
    "digits of a bound": (b"name = 'x'\n[optimizer]\neps = {low = 1, high = " + b"9" * 4_000 + b"}", "eps|too large"),
    "parent that is no name": (b"name = 'x'\ninherits = ['vision']", "inherits: .* is not one of"),
    "size": (b"#" * (2**18 + 1), "larger than 256 KiB"),
    "bytes": (b"name = '\xff'", "not UTF-8 text"),
    "growth factor": (b"name = 'x'\n[grad_scaler]\ngrowth_factor = {choices = [1.0]}", "greater than 1"),
    "backoff factor": (b"name = 'x'\n[grad_scaler]\nbackoff_factor = {low = 0.5, high = 1.0}", "less than 1"),
    "scale": (b"name = 'x'\n[grad_scaler]\ninit_scale = {low = -1.0, high = 2.0}", "greater than 0"),
    "largest scale": (b"name = 'x'\n[grad_scaler]\ninit_scale = {low = 1.0, high = 1e39, log = true}", "less than or"),
    "interval": (b"name = 'x'\n[grad_scaler]\ngrowth_interval = {choices = [0]}", "greater than or equal to 1"),
    "half an interval": (b"name = 'x'\n[grad_scaler]\ngrowth_interval = {choices = [10.5]}", "valid integer"),
    "largest interval": (b"name = 'x'\n[grad_scaler]\ngrowth_interval = {choices = [3000000000]}", "2147483647"),
}


@pytest.mark.parametrize(("text", "words"), SPACES.values(), ids=SPACES.keys())
def test_a_hostile_space_is_one_short_line(text: bytes, words: str, tmp_path: Path) -> None:
    (path := tmp_path / "mine.toml").write_bytes(text)
    with pytest.raises(UsageError, match=words) as caught:
        load_space(path)
    assert len(str(caught.value)) < 1_000
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["device", "pipe", "folder"])
def test_a_space_that_is_no_file_is_refused_at_once(kind: str, tmp_path: Path) -> None:
    path = Path("/dev/zero") if kind == "device" else tmp_path / "mine.toml"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    with pytest.raises(UsageError, match="no regular file"):
        load_space(path)


def test_a_byte_order_mark_is_no_part_of_a_space(tmp_path: Path) -> None:
    (path := tmp_path / "mine.toml").write_bytes(b"\xef\xbb\xbfname = 'mine'\n")
    assert load_space(path).name == "mine"


def _endless() -> dict[str, Any]:
    endless: list[Any] = []
    endless.append(endless)
    return {"settings": endless}


@pytest.mark.parametrize(
    "parts",
    [{"a": {"b": object()}}, {"a": {"b": float("nan")}}, {"a": {"b": {1, 2}}}, {"a": {"b": b"x"}}, _endless()],
    ids=["object", "nan", "set", "bytes", "endless"],
)
def test_a_setting_that_is_no_json_is_named(parts: dict[str, Any]) -> None:
    with pytest.raises(TaskError, match=r"^(a\.b|settings): \w+ is no JSON value"):
        study_identity(task=None, **parts)
