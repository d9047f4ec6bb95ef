"""The study's dtype: what `half` means, a study's arms and parameters, both dtypes in one, studies of before."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import optuna
import pytest
from toys import FakeMeasure, tiny_plan

from autoprec.errors import UsageError
from autoprec.policy import Policy, load_policy
from autoprec.search.pipeline import run_search
from autoprec.search.policy_sampler import PolicySampler
from autoprec.search.prior import PolicyPrior
from autoprec.search.space import load_space, parse_space
from autoprec.search.study_dtype import choose_dtype, resolve_space
from autoprec.trials.outcome import Outcome, TrialSettings

HALVES = {"fp16", "bf16", "half"}


@pytest.mark.parametrize(
    ("asked", "choices", "native", "expected"),
    [
        ("auto", ["half"], True, "bf16"),
        ("auto", ["half"], False, "fp16"),
        ("auto", ["bf16"], True, "bf16"),
        ("auto", ["fp16"], True, "fp16"),
        ("auto", ["fp16", "bf16"], True, "mixed"),
        ("auto", ["half", "fp16"], True, "fp16"),
        ("both", ["half"], True, "both"),
        ("fp16", ["half"], True, "fp16"),
    ],
)
def test_the_dtype_is_what_is_asked_else_what_the_space_names_else_the_targets(
    asked: str, choices: list[str], native: bool, expected: str
) -> None:
    space = parse_space({"name": "mine", "choices": ["fp32", "autocast", *choices]}, where="mine.toml")
    assert choose_dtype(asked, space, native_bf16=native, target="a GPU") == expected


def test_a_space_may_say_its_dtype_and_what_is_asked_wins() -> None:
    space = parse_space({"name": "mine", "inherits": "vit", "dtype": "fp16"}, where="mine.toml")
    assert choose_dtype("auto", space, native_bf16=True, target="a GPU") == "fp16"
    assert choose_dtype("bf16", space, native_bf16=True, target="a GPU") == "bf16"


@pytest.mark.parametrize(
    ("asked", "choices", "message"),
    [
        ("bf16", ["half"], "dtype 'bf16': Tesla T4 has no BF16 units; allowed there: fp16"),
        ("mixed", ["half"], "dtype 'mixed': Tesla T4 has no BF16 units; allowed there: fp16"),
        ("auto", ["bf16"], "search space mine: it asks for BF16, and Tesla T4 has no BF16 units; allowed there: fp16"),
    ],
)
def test_bf16_is_refused_where_the_target_has_no_units_for_it(asked: str, choices: list[str], message: str) -> None:
    space = parse_space({"name": "mine", "choices": ["fp32", "autocast", *choices]}, where="mine.toml")
    with pytest.raises(UsageError) as caught:
        choose_dtype(asked, space, native_bf16=False, target="Tesla T4")
    assert str(caught.value) == message


def test_an_unknown_dtype_is_refused_with_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"dtype 'fp61'; allowed: auto, bf16, fp16, both, mixed; nearest: fp16"):
        tiny_plan(dtype="fp61")


def test_a_space_of_bf16_that_inherits_another_is_accepted_and_starts_from_bf16() -> None:
    data = {"name": "mine", "inherits": "vit", "choices": ["fp32", "autocast", "bf16"]}
    space = resolve_space(parse_space(data, where="mine.toml"), "bf16")
    assert {rule.start for rule in space.rules} == {"bf16", "fp32"}


def test_a_space_that_names_the_other_half_is_refused() -> None:
    space = parse_space({"name": "mine", "choices": ["fp32", "autocast", "fp16"]}, where="mine.toml")
    with pytest.raises(UsageError, match="names fp16, which a study in bf16 does not have; say half there, or search"):
        resolve_space(space, "bf16")


@pytest.mark.parametrize(
    ("dtype", "half"), [("fp16", ["fp16"]), ("bf16", ["bf16"]), ("both", ["half"]), ("mixed", ["bf16", "fp16"])]
)
def test_half_is_written_as_the_study_has_it(dtype: str, half: list[str]) -> None:
    assert resolve_space(load_space("cnn"), dtype).choices == ["fp32", "autocast", *half]


def test_a_bf16_study_has_no_scaler_and_only_policies_in_bf16(tmp_path: Path) -> None:
    plan = tiny_plan(tmp_path, dtype="auto", n_trials=9)
    assert [arm.name for arm in plan.arms if arm.is_baseline] == ["fp32", "autocast bf16"]
    names = list(plan.parameters.distributions)
    assert "autocast/dtype" not in names
    assert not [name for name in names if name.startswith("grad_scaler/")]
    result = run_search(plan, FakeMeasure())
    assert any(not record.arm for record in result.records)
    for record in result.records:
        assert not record.policy.needs_grad_scaler
        assert record.policy.grad_scaler is None
        assert HALVES & set(record.policy.modules.values()) <= {"bf16"}
    assert all("skip_rate" not in trial.constraints for trial in result.study.trials)


def test_the_found_bf16_policy_goes_through_proof_and_export(tmp_path: Path) -> None:
    result = run_search(tiny_plan(tmp_path, dtype="bf16", n_trials=9), FakeMeasure())
    assert result.choice.kind == "policy"
    policy = load_policy(tmp_path / "policy.json")
    assert policy.low_precisions == {"bf16"}
    assert policy.grad_scaler is None
    assert "bf16" in policy.modules.values()
    assert result.verification.verdicts[result.choice.name].kind == "proved"


@pytest.mark.parametrize("gpu", ["v100", "t4"])
def test_on_a_gpu_without_bf16_units_the_study_is_in_fp16(gpu: str) -> None:
    plan = tiny_plan(dtype="auto", gpu=gpu)
    assert plan.parameters.dtype == "fp16"
    assert [arm.name for arm in plan.arms if arm.is_baseline] == ["fp32", "autocast fp16"]
    assert "grad_scaler/init_scale" in plan.parameters.distributions


def test_warm_starts_of_bf16_give_to_half_part_by_part_what_autocast_keeps_in_fp32() -> None:
    arms = {arm.name: arm.policy for arm in tiny_plan(dtype="bf16").arms}
    assert list(arms)[2:] == [
        "half but norms and head",
        "half everywhere",
        "norms in half",
        "residual stream in half",
        "half but softmax",
    ]
    assert set(arms["half everywhere"].modules.values()) == {"bf16"}
    assert dict(arms["norms in half"].modules) == {"norm": "bf16"}
    assert arms["half but norms and head"].modules["norm"] == "fp32"


def test_a_mixed_study_has_bf16_policies_with_fp16_modules_and_a_scaler() -> None:
    plan = tiny_plan(dtype="mixed")
    arm = next(arm for arm in plan.arms if arm.name == "bf16 with norms in fp16")
    assert arm.policy.dtype == "bf16"
    assert arm.policy.modules["norm"] == "fp16"
    assert arm.policy.needs_grad_scaler
    assert "grad_scaler/init_scale" in plan.parameters.distributions
    assert set(plan.parameters.distributions["precision/norm"].choices) == {"fp32", "autocast", "bf16", "fp16"}


class OneFails(FakeMeasure):
    """Policies of one dtype fail in the unit `norm` where that is in half, those of the other cost a little more."""

    def __init__(self, dtype: str) -> None:
        super().__init__()
        self.harmed = dtype

    def __call__(self, policy: Policy, settings: TrialSettings) -> Outcome:
        outcome = super().__call__(policy, settings)
        if policy.modules.get("norm") == self.harmed:
            return Outcome(kind="non_finite_loss", message="planted")
        if policy.default == "autocast" and policy.dtype == self.harmed:
            worse = outcome.peak_memory_bytes.model_copy(update={"value": outcome.peak_memory_bytes.value * 1.01})
            return outcome.model_copy(update={"peak_memory_bytes": worse})
        return outcome


@pytest.mark.parametrize("harmed", ["fp16", "bf16"])
def test_both_dtypes_are_sampled_and_the_better_one_is_recommended(harmed: str, tmp_path: Path) -> None:
    result = run_search(tiny_plan(tmp_path, dtype="both", n_trials=16), OneFails(harmed))
    sampled = [record.policy.dtype for record in result.records if not record.arm and not record.is_cached]
    assert {"fp16", "bf16"} <= set(sampled)
    other = "bf16" if harmed == "fp16" else "fp16"
    assert result.policy.low_precisions == {other}
    found = [c for c in result.candidates if c.is_found]
    assert other in {c.policy.dtype for c in found}
    params = [trial.params["autocast/dtype"] for trial in result.study.trials if not trial.user_attrs.get("arm")]
    assert {"fp16", "bf16"} <= set(params)


def test_an_fp16_study_goes_on_under_the_command_that_would_begin_one_in_bf16(tmp_path: Path) -> None:
    begun = run_search(tiny_plan(tmp_path, dtype="fp16", n_trials=7), FakeMeasure())
    assert "dtype" not in begun.plan.identity  # as a study of before there was a choice
    plan = tiny_plan(tmp_path, dtype="auto", n_trials=9)
    assert plan.study_name == begun.plan.study_name
    assert plan.parameters.dtype == "fp16"
    assert any("begun in FP16" in note for note in plan.notes)
    resumed = run_search(plan, FakeMeasure())
    assert [r.key for r in resumed.records][: len(begun.records)] == [r.key for r in begun.records]
    assert len([r for r in resumed.records if not r.is_cached]) == 9


def test_a_study_of_another_dtype_is_another_study() -> None:
    names = {dtype: tiny_plan(dtype=dtype).study_name for dtype in ("fp16", "bf16", "both", "mixed")}
    assert len(set(names.values())) == 4
    assert tiny_plan(dtype="auto").study_name == names["bf16"]


def test_a_family_learns_costs_from_all_trials_and_failures_from_its_own() -> None:
    """Unit `a` fails in FP16 and trains in BF16; the sampler keeps it in FP32 in FP16 alone."""

    def objective(trial: optuna.Trial) -> tuple[float, float]:
        dtype = trial.suggest_categorical("dtype", ["fp16", "bf16"])
        choices: Mapping[str, str] = {
            name: trial.suggest_categorical(f"precision/{name}", ["fp32", "half"]) for name in "abcdef"
        }
        if dtype == "fp16" and choices["a"] == "half":
            trial.set_constraint("finite", 1.0)
            trial.set_user_attr("failed_unit", "precision/a")
            return 10.0, 10.0
        trial.set_constraint("finite", -1.0)
        saved = sum(0.1 for choice in choices.values() if choice == "half")
        return 1.0 - saved, 1.0 - saved

    families = {"dtype": {"bf16": PolicyPrior(), "fp16": PolicyPrior()}}
    study = optuna.create_study(directions=["minimize"] * 2, sampler=PolicySampler(seed=0, families=families))
    study.optimize(objective, n_trials=24)
    best = {}
    for dtype in ("fp16", "bf16"):
        own = [t for t in study.trials if t.params["dtype"] == dtype and t.constraints["finite"] <= 0]
        best[dtype] = min(own, key=lambda trial: trial.values[0])
    assert np.isclose(best["bf16"].values[0], 0.4)
    assert np.isclose(best["fp16"].values[0], 0.5)
    assert best["fp16"].params["precision/a"] == "fp32"
    failed = [t for t in study.trials if t.constraints["finite"] > 0]
    assert 1 <= len(failed) <= 5  # of 12


@pytest.mark.parametrize(
    ("compare", "arm"), [("fp16", "autocast fp16"), ("bf16", "autocast bf16"), (None, "autocast bf16")]
)
def test_what_runs_today_is_an_arm_of_a_bf16_study_whatever_its_dtype(compare: str | None, arm: str) -> None:
    plan = tiny_plan(dtype="bf16", compare=compare)
    assert arm in [each.name for each in plan.arms if each.is_baseline]
