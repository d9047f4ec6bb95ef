"""The shortest form of a policy: the same precision for every module, in the rules that a person would write."""

from __future__ import annotations

import pytest

from autoprec.policy import GradScalerSettings, Policy, parents_of, resolve_precisions
from autoprec.profiling.profile import PrecisionCost, Profile, UnitProfile
from autoprec.search.decision import Decision
from autoprec.search.parameters import Parameters
from autoprec.search.simplest import described, explicit, with_globs, without_idle_rules

NAMES = [
    "patch_embed.proj",
    *(f"blocks.{i}.{part}" for i in range(12) for part in ("norm1", "attn", "attn.drop", "ls1", "norm2", "mlp.fc1")),
    "norm",
    "fc_norm",
    "head",
]
NORMS = {f"blocks.{i}.norm{k}": "fp16" for i in range(12) for k in (1, 2)}


def same(first: Policy, second: Policy) -> bool:
    parents = parents_of(NAMES)
    return resolve_precisions(first, parents)[0] == resolve_precisions(second, parents)[0]


def test_norms_of_all_blocks_are_one_glob() -> None:
    policy = Policy(default="autocast", modules={**NORMS, "norm": "fp16", "fc_norm": "fp16"})
    short = with_globs(policy, NAMES)
    assert dict(short.modules) == {"blocks.*.norm?": "fp16", "norm": "fp16", "fc_norm": "fp16"}
    assert same(short, policy)
    assert described(short) == "autocast FP16, blocks.*.norm?, norm and fc_norm in FP16"


@pytest.mark.parametrize(
    "modules",
    [
        {name: p for name, p in NORMS.items() if not name.startswith("blocks.3")},
        NORMS | {"blocks.3.norm1": "fp32"},
        {"blocks.0.norm1": "fp16"},
        {f"blocks.{i}": "fp32" for i in range(0, 12, 2)},
        NORMS | {"blocks.5": "fp32"},
    ],
    ids=["not in one block", "fp32 in one block", "one alone", "every second block", "a block around"],
)
def test_a_glob_never_changes_a_module_that_no_rule_named(modules: dict[str, str]) -> None:
    policy = Policy(default="autocast", modules=modules)
    assert same(with_globs(policy, NAMES), policy)
    assert len(with_globs(policy, NAMES).modules) <= len(modules)


def test_rules_that_cost_and_save_nothing_go_to_the_default_and_those_that_matter_stay() -> None:
    units = dict.fromkeys(("norm", "drop", "embed", "unseen", "pinned"), "LayerNorm")
    decisions = tuple(
        Decision(name=name, units={name: kind}, choices=("fp32", "autocast", "fp16"), depth=0.0)
        for name, kind in units.items()
    )
    nothing, half = PrecisionCost(seconds=1e-9, peak_bytes=1.0), PrecisionCost(seconds=1e-3, peak_bytes=5e6)
    full = PrecisionCost(seconds=2e-3, peak_bytes=1e7)
    costs = {"fp32": nothing, "autocast": nothing, "fp16": nothing}
    profile = Profile.model_construct(
        step_seconds={"fp32": 1.0},
        peak_bytes={"fp32": 1e9},
        units={
            "norm": UnitProfile.model_construct(costs={"fp32": full, "autocast": full, "fp16": half}),
            "drop": UnitProfile.model_construct(costs=costs),
            "embed": UnitProfile.model_construct(costs=costs),
            "pinned": UnitProfile.model_construct(costs=costs),
        },
    )
    policy = Policy(
        default="autocast",
        modules={"norm": "fp16", "drop": "fp16", "embed": "fp32", "unseen": "fp32", "pinned": "fp32"},
    )
    short = without_idle_rules(policy, Parameters(decisions, {}, {}), profile, ["pinned"])
    assert dict(short.modules) == {"norm": "fp16", "unseen": "fp32", "pinned": "fp32"}
    assert without_idle_rules(policy, Parameters(decisions, {}, {}), None, []) == policy


def test_explicit_rules_undo_globs() -> None:
    decisions = tuple(
        Decision(name=name, units={name: "LayerNorm"}, choices=("fp32", "autocast", "fp16"), depth=0.0)
        for name in NORMS
    )
    short = Policy(default="autocast", modules={"blocks.*.norm?": "fp16"})
    assert dict(explicit(short, Parameters(decisions, {}, {}), NAMES).modules) == NORMS


def test_scaler_and_many_rules_are_told_in_short() -> None:
    policy = Policy(
        default="fp16",
        modules={f"layer{c}": "fp32" for c in "abcdef"},
        grad_scaler=GradScalerSettings(init_scale=4096.0),
    )
    assert described(policy) == "FP16, layera, layerb, layerc and 3 more rules in FP32, init_scale 4096"
