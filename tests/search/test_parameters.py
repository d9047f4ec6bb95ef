"""Parameters of the study: from values to a policy, and when two policies are one in effect."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from autoprec.errors import UsageError
from autoprec.policy import GradScalerSettings, Policy
from autoprec.search.arms import BASELINES, baselines, warm_starts
from autoprec.search.decision import Decision
from autoprec.search.parameters import Parameters, build_parameters
from autoprec.search.space import SearchSpace, load_space, parse_space

LOW = ("fp32", "autocast", "fp16")
ADAM = {"eps": 1e-8, "amsgrad": False}


def make(
    *, space: SearchSpace | None = None, optimizer: Mapping[str, object] = ADAM, bf16: bool = True, **settings: object
) -> Parameters:
    decisions = [
        Decision("stem", {"stem.conv": "Conv2d", "stem.bn": "BatchNorm2d"}, LOW, depth=0.0),
        Decision("norm", {"norm": "LayerNorm"}, LOW, depth=0.5),
        Decision("rnn", {"rnn": "LSTM"}, ("fp32",), {"fp16": "no kernel"}, depth=0.7),
        Decision("head", {"head": "Linear"}, LOW, depth=1.0),
    ]
    return build_parameters(
        decisions, space or load_space("cnn"), optimizer_defaults=optimizer, native_bf16=bf16, **settings
    )


def test_the_names_are_those_of_the_design() -> None:
    assert list(make().distributions) == [
        "precision/stem",
        "precision/norm",
        "precision/head",
        "grad_scaler/init_scale",
        "grad_scaler/growth_factor",
        "grad_scaler/backoff_factor",
        "grad_scaler/growth_interval",
        "optimizer/eps",
        "optimizer/amsgrad",
        "autocast/dtype",
    ]


def test_without_an_adam_like_optimizer_its_parameters_leave_the_study() -> None:
    assert not [name for name in make(optimizer={}).distributions if name.startswith("optimizer/")]


def test_without_bf16_units_there_is_no_dtype_to_choose_and_no_bf16_baseline() -> None:
    parameters = make(bf16=False)
    assert "autocast/dtype" not in parameters.distributions
    assert [arm.name for arm in baselines(parameters, native_bf16=False)] == ["fp32", "autocast fp16"]


def test_ranges_of_the_file_become_distributions() -> None:
    data = {
        "name": "x",
        "grad_scaler": {
            "init_scale": {"low": 256.0, "high": 131072.0, "log": True},
            "growth_interval": {"low": 100, "high": 4000},
        },
        "optimizer": {"eps": {"choices": [1e-8, 1e-6]}},
    }
    found = make(space=parse_space(data, where="x.toml")).distributions
    assert found["grad_scaler/init_scale"] == FloatDistribution(256.0, 131072.0, log=True)
    assert found["grad_scaler/growth_interval"] == IntDistribution(100, 4000)
    assert found["optimizer/eps"] == CategoricalDistribution((1e-8, 1e-6))
    assert "optimizer/amsgrad" not in found


def test_a_range_without_the_default_is_refused_since_the_baselines_need_it() -> None:
    space = parse_space({"name": "x", "grad_scaler": {"init_scale": {"choices": [1.0, 2.0]}}}, where="x.toml")
    with pytest.raises(UsageError, match=r"init_scale.*65536"):
        make(space=space)


def test_values_become_module_rules_over_an_autocast_default() -> None:
    parameters = make()
    values = parameters.values(lambda d: "fp16" if d.name == "norm" else "autocast")
    assert parameters.policy(values) == Policy(default="autocast", modules={"norm": "fp16", "rnn": "fp32"})


def test_fp32_in_every_decision_is_the_fp32_policy() -> None:
    parameters = make()
    assert parameters.policy(parameters.values(lambda d: "fp32")) == Policy(default="fp32")


def test_scaler_and_optimizer_settings_are_written_only_where_they_leave_the_defaults() -> None:
    parameters = make()
    values = parameters.values(lambda d: "autocast", {"grad_scaler/init_scale": 1024.0, "optimizer/eps": 1e-6})
    policy = parameters.policy(values)
    assert policy.grad_scaler == GradScalerSettings(init_scale=1024.0)
    assert policy.optimizer is not None
    assert (policy.optimizer.eps, policy.optimizer.amsgrad) == (1e-6, None)


def test_a_choice_that_a_decision_lacks_becomes_autocast_and_an_unknown_change_is_left_out() -> None:
    parameters = make(bf16=False)
    values = parameters.values(lambda d: "bf16", {"autocast/dtype": "bf16", "grad_scaler/init_scale": 3.0})
    assert values["precision/stem"] == "autocast"
    assert "autocast/dtype" not in values
    assert values["grad_scaler/init_scale"] == 65536.0


def test_code_that_cannot_run_under_autocast_is_fp32_around_units_that_keep_theirs() -> None:
    decisions = [Decision("a", {"block.a": "Linear"}, LOW), Decision("b", {"b": "Linear"}, LOW)]
    parameters = build_parameters(
        decisions, load_space("cnn"), optimizer_defaults={}, native_bf16=False, fp32_code=["block"]
    )
    policy = parameters.policy(parameters.values(lambda d: "autocast"))
    assert dict(policy.modules) == {"block": "fp32", "block.a": "autocast"}


def test_a_root_that_cannot_run_under_autocast_makes_fp32_the_default() -> None:
    decisions = [Decision("a", {"a": "Linear"}, LOW), Decision("b", {"b": "Linear"}, LOW)]
    parameters = build_parameters(
        decisions, load_space("cnn"), optimizer_defaults={}, native_bf16=False, fp32_code=[""]
    )
    policy = parameters.policy(parameters.values(lambda d: "fp16" if d.name == "a" else "fp32"))
    assert (policy.default, dict(policy.modules)) == ("fp32", {"a": "fp16"})


class TestKey:
    parameters = make()

    def key(self, **modules: str) -> str:
        return self.parameters.key(Policy(default="autocast", modules={**modules, "rnn": "fp32"}))

    def test_a_convolution_with_its_norm_is_the_same_in_half_as_under_autocast(self) -> None:
        assert self.key(**{"stem.conv": "fp16", "stem.bn": "fp16"}) == self.key()

    def test_a_layer_norm_is_not_since_autocast_lifts_it_to_fp32(self) -> None:
        assert self.key(norm="fp16") != self.key()

    def test_half_of_the_other_format_differs(self) -> None:
        other = Policy(default="autocast", dtype="bf16", modules={"head": "fp16", "rnn": "fp32"})
        assert self.parameters.key(other) != self.parameters.key(other.replace(modules={"rnn": "fp32"}))

    def test_the_scaler_counts_only_where_fp16_is(self) -> None:
        scaler = GradScalerSettings(init_scale=8.0)
        for policy, differs in ((BASELINES["fp32"], False), (BASELINES["autocast fp16"], True)):
            changed = policy.replace(grad_scaler=scaler)
            assert (self.parameters.key(policy) != self.parameters.key(changed)) is differs


def test_where_the_space_states_a_familys_practice_it_is_a_warm_start() -> None:
    parameters = make()
    started = [replace(parameters.decisions[0], start="fp16"), *parameters.decisions[1:]]
    names = [arm.name for arm in warm_starts(parameters)]
    first, *others = warm_starts(replace(parameters, decisions=tuple(started)))
    assert first.name == "practice of the family"
    assert dict(first.policy.modules) == {"stem.conv": "fp16", "stem.bn": "fp16", "rnn": "fp32"}
    assert [arm.name for arm in others] == names[1:]


def test_warm_starts_are_half_everywhere_with_and_without_norms_and_head_and_the_published_recipe() -> None:
    arms = {arm.name: arm for arm in warm_starts(make())}
    assert dict(arms["half but norms and head"].policy.modules) == {
        "stem.conv": "fp16",
        "stem.bn": "fp16",
        "norm": "fp32",
        "rnn": "fp32",
        "head": "fp32",
    }
    assert arms["half everywhere"].policy.modules["norm"] == "fp16"
    deep = arms["deep end in fp32"].policy
    assert dict(deep.modules) == {"stem.conv": "fp16", "stem.bn": "fp16", "norm": "fp32", "rnn": "fp32", "head": "fp32"}
    assert deep.grad_scaler == GradScalerSettings(
        init_scale=32768.0, growth_factor=1.5, backoff_factor=0.4, growth_interval=1000
    )
    assert deep.optimizer is not None
    assert (deep.optimizer.eps, deep.optimizer.amsgrad) == (1e-7, True)
