"""The revert pass: what is given back, in which order, and what is kept."""

from __future__ import annotations

from pathlib import Path

import pytest
from toys import FakeMeasure, saved_share, tiny_plan

import autoprec.search.pipeline as pipeline
from autoprec.policy import Number, Policy
from autoprec.search.arms import BASELINES
from autoprec.search.judging import Verdict, VerdictKind
from autoprec.search.parameters import Parameters
from autoprec.search.pipeline import run_search
from autoprec.search.proof import Proof
from autoprec.search.ratios import paired_ratios
from autoprec.search.revert import give_back, savings
from autoprec.search.verification import Verification
from autoprec.search.worth import Candidate, Worth
from autoprec.trials.outcome import Outcome, TrialSettings
from autoprec.trials.target import TargetFigures


@pytest.fixture(scope="module")
def parameters() -> Parameters:
    return tiny_plan(n_trials=6).parameters


def figures(policy: Policy) -> TargetFigures:
    saved = saved_share(policy)
    return TargetFigures(Number(value=1e9 * (1 - saved), kind="computed"), Number(value=1.0, kind="predicted"))


def outcome(policy: Policy) -> Outcome:
    memory = figures(policy).peak_memory_bytes
    throughput = Number(value=1.0, kind="predicted")
    return Outcome(kind="ok", peak_memory_bytes=memory, throughput_samples_per_second=throughput)


def names_in_fp32(policy: Policy) -> set[str]:
    return {name for name, precision in policy.modules.items() if precision == "fp32"}


CAUTIOUS = Policy(default="autocast", modules={"norm": "fp32", "head": "fp32", "blocks.0.conv": "fp16"})
REFERENCE = Candidate("fp32", BASELINES["fp32"], "fp32", outcome(BASELINES["fp32"]))


def run_pass(parameters: Parameters, verdicts: dict[str, VerdictKind]) -> tuple[list[str], set[str], tuple[str, ...]]:
    """Return the decisions tried, the modules left in FP32, and the names of the arms."""
    start = Candidate("trial 7", CAUTIOUS, "start", outcome(CAUTIOUS))

    def prove(name: str, policy: Policy) -> tuple[Candidate, Verification]:
        verdict = next(kind for decision, kind in verdicts.items() if name.endswith(f"{decision} given back"))
        return (
            Candidate(name, policy, name, outcome(policy)),
            Verification(Proof(), {name: Verdict(verdict, None, "")}),
        )

    saved = savings(CAUTIOUS, parameters, figures, with_time=False)
    found = give_back(start, REFERENCE, saved=saved, parameters=parameters, prefer="balanced", prove=prove)
    accepted = start if found.accepted is None else found.accepted
    return list(saved), names_in_fp32(accepted.policy), tuple(candidate.name for candidate, _ in found.tried)


def test_only_units_in_fp32_that_would_save_are_tried(parameters: Parameters) -> None:
    assert set(savings(CAUTIOUS, parameters, figures, with_time=False)) == {"norm", "head"}
    assert savings(Policy(default="autocast"), parameters, figures, with_time=False) == {}


def test_a_unit_that_saves_less_than_a_percent_is_left_alone(parameters: Parameters) -> None:
    def flat(policy: Policy) -> TargetFigures:
        return TargetFigures(Number(value=1e9, kind="computed"), Number(value=1.0, kind="predicted"))

    assert savings(CAUTIOUS, parameters, flat, with_time=False) == {}


def test_groups_are_given_back_one_at_a_time_each_on_top_of_the_last(parameters: Parameters) -> None:
    _, left, tried = run_pass(parameters, {"norm": "proved", "head": "proved"})
    assert left == set()
    assert len(tried) == 2
    assert tried[1].startswith(tried[0])


@pytest.mark.parametrize("verdict", ["refuted", "open"])
def test_a_step_that_is_not_proved_is_undone_and_the_next_one_tried(
    parameters: Parameters, verdict: VerdictKind
) -> None:
    _, left, tried = run_pass(parameters, {"norm": verdict, "head": "proved"})
    assert left == {"norm"}
    assert len(tried) == 2


def test_a_search_gives_back_what_its_winner_keeps_for_nothing_and_a_resumed_one_runs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "estimate_figures", lambda task, policy, settings: figures(policy))

    def fail(policy: Policy) -> str | None:
        """The norm diverges in any half, so that the best is the warm start that spares norms and head."""
        return "non_finite_loss" if policy.low_precisions and policy.modules.get("norm") != "fp32" else None

    measure = FakeMeasure(noise=0.001, fail=fail)
    every_gain = Worth(min_memory_share=0.0)
    result = run_search(tiny_plan(tmp_path / "run", n_trials=6, worth=every_gain), measure)
    verdicts = {name: verdict.kind for name, verdict in result.verification.verdicts.items()}
    assert [kind for name, kind in verdicts.items() if name.endswith("norm given back")] == ["refuted"]
    assert result.choice.name.endswith("head given back")
    assert names_in_fp32(result.policy) == {"norm"}
    again = FakeMeasure(noise=0.001, fail=fail)
    repeated = run_search(tiny_plan(tmp_path / "run", n_trials=6, worth=every_gain), again)
    assert again.order == []
    assert repeated.choice == result.choice


def test_the_intervals_of_measured_ratios_hold_for_the_arms_of_the_pass_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "estimate_figures", lambda task, policy, settings: figures(policy))
    computed = FakeMeasure(
        noise=0.001, fail=lambda p: "unsupported" if p.low_precisions and p.modules.get("norm") != "fp32" else None
    )

    def measure(policy: Policy, settings: TrialSettings) -> Outcome:
        outcome = computed(policy, settings)
        throughput = outcome.throughput_samples_per_second
        if throughput is None:
            return outcome
        value = throughput.value * (1 + 1e-4 * (settings.seed % 7) * len(policy.modules))
        return outcome.model_copy(update={"throughput_samples_per_second": Number(value=value, kind="measured")})

    result = run_search(tiny_plan(tmp_path, n_trials=6, worth=Worth(min_memory_share=0.0)), measure)
    tried = next(c for c in result.candidates if c.name.endswith("head given back"))
    num_arms = sum(len(runs) > 0 for runs in result.verification.outcomes.values()) - 1
    assert num_arms >= 2
    runs = result.verification.outcomes
    assert tried.paired == paired_ratios(runs[tried.name], runs["fp32"], num_arms=num_arms)
    assert tried.paired != paired_ratios(runs[tried.name], runs["fp32"], num_arms=1)
