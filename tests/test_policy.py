"""A policy is a value with a JSON form that is data: round trips, precedence, refusals."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoprec.errors import PolicyError
from autoprec.policy import PRECISIONS, Policy, lies_in, load_policy, resolve_precisions

NAMES = st.text(st.sampled_from("abcxyz019_."), min_size=1, max_size=12)
GLOBS = st.text(st.sampled_from("ab.*?[]"), min_size=1, max_size=8)
POLICIES = st.builds(
    Policy,
    default=st.sampled_from(PRECISIONS),
    dtype=st.sampled_from(["fp16", "bf16"]),
    modules=st.dictionaries(NAMES | GLOBS, st.sampled_from(PRECISIONS), max_size=6),
    grad_scaler=st.none()
    | st.builds(
        dict,
        init_scale=st.floats(2**-10, 2**24),
        growth_interval=st.integers(1, 5000),
        backoff_factor=st.floats(0.01, 0.99),
    ),
    optimizer=st.none() | st.builds(dict, eps=st.floats(1e-12, 1e-2), amsgrad=st.booleans()),
)


def parents_of(names: list[str]) -> dict[str, str | None]:
    return {"": None} | {name: name.rpartition(".")[0] for name in names}


@given(POLICIES)
def test_a_policy_survives_json_pickle_and_copies(policy: Policy) -> None:
    assert Policy.from_json(policy.to_json()) == policy
    assert list(Policy.from_json(policy.to_json()).modules) == list(policy.modules)
    assert pickle.loads(pickle.dumps(policy)) == policy
    assert copy.deepcopy(policy) == policy
    assert hash(copy.deepcopy(policy)) == hash(policy)


@given(POLICIES)
def test_resolving_follows_the_written_precedence(policy: Policy) -> None:
    names = ["a", "a.b", "a.b.a", "b", "b.x", "b.x.0"]
    found, rules = resolve_precisions(policy, parents_of(names))
    for name in names:
        parts = name.split(".")
        above = [".".join(parts[:count]) for count in range(len(parts), 0, -1)]
        exact = next((rule for rule in above if rule in policy.modules), None)
        if exact is not None:
            assert rules[name] == exact
        expected = policy.default if rules[name] is None else policy.modules[rules[name]]
        assert found[name] == expected


EXAMPLES: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "the default": ({}, {"layer4": "autocast", "layer4.0.conv1": "autocast"}),
    "an exact name covers what is below": ({"layer4": "fp32"}, {"layer4.0.conv1": "fp32", "layer40": "autocast"}),
    "the nearest exact name wins": (
        {"layer4": "fp32", "layer4.0.conv1": "fp16"},
        {"layer4.0.conv1": "fp16", "layer4.0": "fp32", "layer4.1": "fp32"},
    ),
    "a glob matches whole names": (
        {"layer4.*": "fp32"},
        {"layer4": "autocast", "layer4.0": "fp32", "layer40": "autocast"},
    ),
    "an exact name beats a glob": ({"*.conv1": "fp16", "layer4": "fp32"}, {"layer4.0.conv1": "fp32"}),
    "the glob with more literals wins": ({"*.conv1": "fp16", "layer4*": "fp32"}, {"layer4.0.conv1": "fp32"}),
    "the later of two equal globs wins": (
        {"*.conv1": "fp16", "layer4": "bf16", "*.conv?": "fp32"},
        {"b.conv1": "fp16"},
    ),
    "a glob covers what is below": ({"layer?": "bf16"}, {"layer4.0.conv1": "bf16", "layer40": "autocast"}),
}


@pytest.mark.parametrize(("modules", "expected"), EXAMPLES.values(), ids=EXAMPLES.keys())
def test_precedence(modules: dict[str, Any], expected: dict[str, str]) -> None:
    names = ["layer4", "layer4.0", "layer4.0.conv1", "layer4.1", "layer40", "b", "b.conv1"]
    found, _ = resolve_precisions(Policy(modules=modules), parents_of(names))
    assert {name: found[name] for name in expected} == expected


def test_a_policy_cannot_be_changed() -> None:
    policy = Policy(modules={"a": "fp16"})
    with pytest.raises(ValueError, match="frozen"):
        policy.default = "fp32"  # type: ignore[misc]
    with pytest.raises(TypeError, match="frozen value"):
        policy.modules["b"] = "fp32"
    assert policy.replace(default="fp32") == Policy(default="fp32", modules={"a": "fp16"})
    assert len({policy, Policy(modules={"a": "fp16"})}) == 1


@pytest.mark.parametrize(
    ("policy", "scaler"),
    [
        (Policy(default="fp32"), False),
        (Policy(default="autocast", dtype="bf16"), False),
        (Policy(default="autocast", dtype="fp16"), True),
        (Policy(default="fp32", modules={"a": "fp16"}), True),
        (Policy(default="bf16", modules={"a": "autocast"}, dtype="bf16"), False),
    ],
)
def test_a_grad_scaler_is_needed_only_where_fp16_is(policy: Policy, scaler: bool) -> None:
    assert policy.needs_grad_scaler is scaler


REFUSED: dict[str, tuple[str, str]] = {
    "unknown precision": ('{"default": "fp15"}', r"\$\.default: found 'fp15'; allowed: fp32, .*; nearest: fp"),
    "unknown key": ('{"defualt": "fp32"}', r"\$\.defualt: unknown key; allowed: .*; nearest: default"),
    "unknown inner key": (
        '{"grad_scaler": {"scale": 1.0}}',
        r"\$\.grad_scaler\.scale: unknown key; allowed: init_scale",
    ),
    "rule": ('{"modules": {"a": "half"}}', r"\$\.modules\.a: found 'half'; allowed: fp32, autocast, fp16, bf16"),
    "rule of another type": ('{"modules": ["a"]}', r"\$\.modules: found \['a'\]"),
    "empty name": ('{"modules": {"": "fp32"}}', "is not a module name or glob"),
    "NaN": ('{"grad_scaler": {"init_scale": NaN}}', "found NaN; JSON numbers are finite"),
    "too large": ('{"grad_scaler": {"init_scale": 1e999}}', "too large; JSON numbers are finite"),
    "negative": ('{"grad_scaler": {"init_scale": -1.0}}', r"\$\.grad_scaler\.init_scale: found -1.0"),
    "a string for a number": ('{"optimizer": {"eps": "1e-8"}}', r"\$\.optimizer\.eps: found '1e-8'"),
    "a key twice": ('{"modules": {"a": "fp32", "a": "fp16"}}', "the key 'a' stands twice"),
    "newer": ('{"schema_version": 2}', "written by a newer autoprec"),
    "no object": ("[1]", "found list, a policy is a JSON object"),
    "no JSON": ('{"default": "fp32"', "not JSON, line 1 column"),
    "nothing": ("", "not JSON, line 1 column 1"),
    "deep": ("[" * 50_000, "nested deeper than 32"),
    "a long number": ('{"schema_version": ' + "9" * 5_000 + "}", "policy"),
}


@pytest.mark.parametrize(("text", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_a_bad_policy_says_where_what_and_what_is_allowed(text: str, message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        Policy.from_json(text)


def test_files_are_read_whole_or_refused_with_their_name(tmp_path: Path) -> None:
    policy = Policy(default="fp32", modules={"a.*": "bf16"})
    path = tmp_path / "policy.json"
    policy.save(path)
    assert load_policy(path) == policy
    assert [item.name for item in tmp_path.iterdir()] == ["policy.json"]
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(PolicyError, match=r"policy\.json: not UTF-8 text \(byte 0\)"):
        load_policy(path)
    path.write_bytes(b" " * (8 * 2**20 + 1))
    with pytest.raises(PolicyError, match="larger than 8 MiB"):
        load_policy(path)
    for bad in (tmp_path / "none.json", tmp_path, "nul\0"):
        with pytest.raises(PolicyError, match="cannot be read"):
            load_policy(bad)


@pytest.mark.parametrize(
    ("name", "module", "inside"),
    [
        ("layer4", "layer4", True),
        ("layer4.0.conv1", "layer4", True),
        ("layer40", "layer4", False),
        ("layer4", "layer4.0", False),
        ("layer4", "", True),
        ("", "", True),
        ("", "layer4", False),
    ],
)
def test_a_name_lies_in_a_module_and_in_all_above_it(name: str, module: str, inside: bool) -> None:
    assert lies_in(name, module) == inside


def test_a_failed_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "policy.json"
    Policy().save(path)
    before = path.read_text()
    monkeypatch.setattr("os.replace", lambda *args: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        Policy(default="fp32").save(path)
    assert path.read_text() == before
    assert len(list(tmp_path.iterdir())) == 1


def test_the_json_form_is_plain_and_leaves_out_what_is_empty() -> None:
    assert json.loads(Policy(modules={"a": "fp32"}).to_json()) == {
        "schema_version": 1,
        "default": "autocast",
        "dtype": "fp16",
        "modules": {"a": "fp32"},
    }
