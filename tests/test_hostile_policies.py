"""Policies that somebody wrote to do harm, or by hand and in an unusual way: one clear line, and soon."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch

from autoprec.cli.app import main
from autoprec.errors import PolicyError
from autoprec.policy import Policy, compare_policies

SOON_SECONDS = 5.0
"""What took minutes takes a fraction of a second; a loaded machine gets time."""

HOSTILE = {
    "unterminated string": ('"' + '\\"' * 20_000, "not JSON"),
    "unterminated string that ends in a backslash": ('"' + '\\"' * 20_000 + "\\", "not JSON"),
    "largest unterminated string": ('"' + '\\"' * 4_000_000, "not JSON"),
    "brackets in an unterminated string": ('{"a": "' + "[" * 40_000, "not JSON"),
    "globs": (json.dumps({"modules": {f"a{i}*": "fp32" for i in range(200_000)}}), "200,000 globs; 200 at most"),
    "modules": (json.dumps({"modules": {f"a{i}": "fp32" for i in range(60_000)}}), "60,000 modules; 50,000 at most"),
    "depth of names": ('{"modules": {"' + "a." * 200 + 'a": "fp32"}}', "100 modules inside each other at most"),
    "digits": ('{"grad_scaler": {"growth_interval": ' + "9" * 4_000 + "}}", "integers have 64 bits"),
    "more digits": ('{"grad_scaler": {"growth_interval": ' + "9" * 5_000 + "}}", "integers have 64 bits"),
    "digits of a shape": (
        '{"model": {"name": "m", "fingerprint": "f", "modules": {"a": {"type": "Linear", "parameters": {"w": ['
        + "9" * 4_000
        + "]}}}}}",
        "integers have 64 bits",
    ),
    "interval": ('{"grad_scaler": {"growth_interval": 2147483648}}', "less than or equal to 2147483647"),
    "scale": ('{"grad_scaler": {"init_scale": 1e39}}', "less than or equal to 34028234663852886"),
    "a line break in a name": ('{"modules": {"a\\nb": 3.7}}', r"modules.a\\nb: found 3.7"),
    "a long key": ('{"' + "k" * 2_000_000 + '": 1}', "unknown key"),
}


@pytest.mark.parametrize(("text", "words"), HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_policy_is_one_short_line_and_soon(text: str, words: str) -> None:
    started = time.perf_counter()
    with pytest.raises(PolicyError, match=words) as caught:
        Policy.from_json(text)
    assert time.perf_counter() - started < SOON_SECONDS
    assert len(str(caught.value)) < 1_000
    assert "\n" not in str(caught.value)


def test_the_largest_settings_are_what_a_grad_scaler_takes() -> None:
    settings = Policy.from_json('{"grad_scaler": {"init_scale": 3.4028234663852886e38, "growth_interval": 2147483647}}')
    assert settings.grad_scaler is not None
    scaler = torch.amp.GradScaler("cpu", init_scale=settings.grad_scaler.init_scale)
    scaler.scale(torch.ones(()))
    assert scaler.get_scale() == settings.grad_scaler.init_scale
    torch.tensor(settings.grad_scaler.growth_interval, dtype=torch.int32)


def test_nested_names_that_differ_stand_each_for_itself() -> None:
    found = compare_policies(Policy(modules={"layer4": "fp32", "layer4.0": "bf16"}), Policy())
    assert found.units == {"layer4": ("fp32", "autocast"), "layer4.0": ("bf16", "autocast")}
    assert found.num_units == {"layer4": 1, "layer4.0": 1}


def test_nested_names_that_change_alike_stand_as_one() -> None:
    found = compare_policies(Policy(modules={"layer4": "fp32", "layer4.0": "fp32"}), Policy())
    assert found.units == {"layer4": ("fp32", "autocast")}
    assert found.num_units == {"layer4": 2}


def test_policies_of_many_units_are_compared_soon() -> None:
    modules = {f"blocks.{i}.linear": "fp32" if i % 2 else "bf16" for i in range(20_000)}
    started = time.perf_counter()
    assert len(compare_policies(Policy(modules=modules), Policy()).units) == 20_000
    assert time.perf_counter() - started < SOON_SECONDS


@pytest.mark.parametrize("command", ["show", "diff"])
def test_names_as_deep_as_allowed_are_shown(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name = ".".join("m" * 100)
    Policy(modules={name: "fp32"}).save(tmp_path / "policy.json")
    Policy().save(tmp_path / "other.json")
    files = [str(tmp_path / "policy.json"), *([str(tmp_path / "other.json")] if command == "diff" else [])]
    monkeypatch.setattr("sys.argv", ["autoprec", command, *files])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    assert capsys.readouterr().err == ""
