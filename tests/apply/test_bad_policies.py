"""Generated bad policies: only PolicyError or ApplyError, the model unchanged, nothing run."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from autoprec import Policy, apply_policy
from autoprec.apply import applied_policy, check_fit, describe_model, read_structure
from autoprec.errors import ApplyError, PolicyError


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.attention = nn.MultiheadAttention(4, 2)
        self.again = self.body
        self.tied = nn.Linear(4, 4)
        self.tied.weight = self.body[0].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.tied(self.attention(*[self.body(x)] * 3)[0])


MODEL = Model()
VALID = {
    "schema_version": 1,
    "default": "autocast",
    "dtype": "fp16",
    "modules": {"attention": "fp32", "body.1": "fp32"},
    "grad_scaler": {"init_scale": 1024.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 100},
    "optimizer": {"name": "AdamW", "eps": 1e-6, "amsgrad": False},
    "model": describe_model(read_structure(MODEL), "model").model_dump(mode="json"),
}
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
STRANGE_NAMES = st.text(min_size=1, max_size=20).filter(
    lambda n: n.strip("*?") and not n.startswith(("a", "b", "t", "[", "*", "?"))
)


def with_rules(rules: dict[str, Any]) -> dict[str, Any]:
    return {**VALID, "modules": rules}


def with_scaler(name: str, value: Any) -> dict[str, Any]:
    return {**VALID, "grad_scaler": {**VALID["grad_scaler"], name: value}}


def changed_type(name: str, kind: str) -> dict[str, Any]:
    modules = {**VALID["model"]["modules"], name: {"type": kind, "parameters": {}}}
    return {**VALID, "model": {**VALID["model"], "modules": modules}}


BAD_VALUES = st.one_of(
    st.builds(
        lambda v: {**VALID, "default": v}, ANYTHING.filter(lambda v: v not in ("fp32", "autocast", "fp16", "bf16"))
    ),
    st.builds(lambda v: {**VALID, "dtype": v}, ANYTHING.filter(lambda v: v not in ("fp16", "bf16"))),
    st.builds(
        lambda k, v: {**VALID, k: v}, st.text(max_size=12).filter(lambda k: k not in Policy.model_fields), ANYTHING
    ),
    st.builds(lambda n: with_rules({n: "fp16"}), STRANGE_NAMES),
    st.builds(
        lambda v: with_rules({"body": v}), ANYTHING.filter(lambda v: v not in ("fp32", "autocast", "fp16", "bf16"))
    ),
    st.just(with_rules({"attention.out_proj": "fp32"})),
    st.just(with_rules({"body": "fp16", "again": "fp32"})),
    st.just(with_rules({"body.0": "fp16", "tied": "fp32"})),
    st.builds(lambda v: with_scaler("init_scale", v), st.floats(max_value=0.0) | st.text()),
    st.builds(lambda v: with_scaler("growth_interval", v), st.integers(max_value=0) | st.floats()),
    st.builds(lambda k: changed_type("tied", k), st.text(max_size=10).filter(lambda k: k not in ("Linear", "Module"))),
    st.builds(lambda n: changed_type(n, "Linear"), STRANGE_NAMES),
    st.builds(lambda v: {**VALID, "schema_version": v}, st.integers(min_value=2) | st.integers(max_value=0)),
    ANYTHING.filter(lambda v: not isinstance(v, dict)),
)
BAD_TEXTS = st.one_of(
    BAD_VALUES.map(json.dumps),
    st.integers(0, len(json.dumps(VALID)) - 1).map(lambda n: json.dumps(VALID)[:n]),
    st.integers(33, 3000).map(lambda n: '{"a":' * n + "1" + "}" * n),
    st.text(max_size=30).filter(lambda t: not t.strip().startswith("{")),
    st.just('{"default": "fp32", "default": "fp16"}'),
)


def snapshot() -> list[Any]:
    return [(sorted(m.__dict__), len(m._forward_hooks), m.__dict__.get("forward")) for m in MODEL.modules()]


BARE = snapshot()


def check(text: str | bytes) -> None:
    with pytest.raises((PolicyError, ApplyError)) as caught:
        apply_policy(MODEL, Policy.from_json(text))
    assert type(caught.value) in (PolicyError, ApplyError)
    assert str(caught.value)
    assert snapshot() == BARE


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(BAD_TEXTS | st.binary(max_size=40).filter(lambda b: not b.strip().startswith(b"{")))
def test_bad_policies_raise_only_our_errors_and_change_nothing(text: str | bytes) -> None:
    check(text)


@pytest.mark.slow
@settings(max_examples=10_000, deadline=None, suppress_health_check=list(HealthCheck))
@given(BAD_TEXTS)
def test_ten_thousand_bad_policies(text: str) -> None:
    check(text)


AUDIT = """
import json, sys, tempfile, os
from torch import nn
from autoprec import apply_policy, load_policy
from autoprec.errors import ApplyError, PolicyError

texts = json.load(sys.stdin)
model = nn.Sequential(nn.Linear(2, 2))
path = os.path.join(tempfile.mkdtemp(), "policy.json")
seen = []
watching = False
WATCHED = ("import", "exec", "compile", "open", "os.", "subprocess", "socket", "ctypes", "pickle", "marshal", "shutil")

def audit(event, args):
    if watching and event.startswith(WATCHED):
        if not (event == "open" and args[0] == path and args[1] in ("r", "rb")):
            seen.append((event, str(args)[:200]))

sys.addaudithook(audit)
for number, text in enumerate(texts * 2):
    with open(path, "wb") as file:
        file.write(text.encode("utf-8", "surrogatepass"))
    watching = number >= len(texts)  # the first round loads what pydantic and difflib load lazily
    try:
        apply_policy(model, load_policy(path))
        seen.append(("applied", text))
    except (ApplyError, PolicyError):
        pass
    watching = False
print(json.dumps(seen))
"""


def test_reading_a_bad_policy_runs_imports_and_opens_nothing_else() -> None:
    texts = [
        "{\"default\": \"__import__('os').system('true')\"}",
        '{"modules": {"os.system": "fp16"}}',
        '{"modules": {"0": "eval"}}',
        '{"__class__": "subprocess.Popen", "default": "fp32"}',
        '{"model": {"name": "x", "fingerprint": "y", "modules": {"0": {"type": "torch.nn.Linear"}}}}',
        '{"default": "fp32"',
        "!!python/object/apply:os.system [true]",
        "cos\nsystem\n(S'true'\ntR.",
        '{"provenance": {"settings": {"a": {"b": 1}}}}',
    ]
    done = subprocess.run(
        [sys.executable, "-c", AUDIT], input=json.dumps(texts), capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == []


class Wrapped(nn.Module):
    """A LightningModule's shape: the network is an attribute."""

    def __init__(self, network: nn.Module, *, name: str = "model") -> None:
        super().__init__()
        self.add_module(name, network)
        self.name = name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.get_submodule(self.name)(x)
        return output


def small() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(10)), nn.ReLU())


def found_on_the_network() -> Policy:
    described = describe_model(read_structure(small()), "small")
    return Policy(default="autocast", dtype="bf16", modules={"0": "fp32", "*9": "bf16"}, model=described)


def test_a_policy_found_on_the_network_inside_applies_where_the_prefix_is_the_only_difference() -> None:
    model = Wrapped(small())
    apply_policy(model, found_on_the_network())
    plain = apply_policy(small(), found_on_the_network())
    plain.load_state_dict(model.get_submodule("model").state_dict())
    x = torch.randn(3, 4)
    assert torch.equal(model(x), plain(x))
    assert applied_policy(model) == found_on_the_network()
    fit = check_fit(Wrapped(small()), found_on_the_network())
    assert fit.fits
    assert fit.unknown == ()
    assert fit.counts == {"fp32": 1, "bf16": 1, "autocast": 8}


def test_a_policy_found_on_a_network_inside_that_differs_says_so_and_what_to_do() -> None:
    other = nn.Sequential(*(nn.Linear(4, 4) for _ in range(9)))
    message = r"match no module .*1 of 2 missing names are below 'model': .* module='model'"
    with pytest.raises(ApplyError, match=message):
        apply_policy(Wrapped(other), found_on_the_network())
    policy = found_on_the_network().replace(modules={})
    with pytest.raises(
        ApplyError, match=r"another model .*9 of 11 missing names are below 'model': the policy was found"
    ):
        apply_policy(Wrapped(other), policy)
