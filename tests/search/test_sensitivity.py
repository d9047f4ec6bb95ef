"""A proof can fail: where FP32 learns too little, nothing is proved, the runs are made longer, and that is told."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from test_verification import FOUND, prove
from torch import nn
from toys import FakeMeasure

from autoprec import verify_policy
from autoprec.policy import Number, Policy
from autoprec.search.judging import judge
from autoprec.search.metric import Metric, metric_of
from autoprec.search.proof import Proof
from autoprec.search.sensitivity import Sensitivity, steps_needed, what_was_learned
from autoprec.tasks import Task
from autoprec.trials import run_trial
from autoprec.trials.outcome import EndKind, Outcome, TrialSettings

RELATIVE = Proof(looks=(4, 8), num_steps=40, max_steps=320)


def learner(gain: float, *, loss_gain: float = 2.0, noise: float = 0.001, per_step: bool = False) -> Any:
    """A measurement whose FP32 gains so much over its start of .1; policies are as good as FP32."""

    def measure(policy: Policy, settings: TrialSettings) -> Outcome:
        steps = settings.warmup_steps + settings.measured_steps
        factor = steps / 40 if per_step else 1.0
        shift = noise * ((settings.seed * 7919 + len(policy.to_json())) % 13 - 6) / 6
        outcome = FakeMeasure()(policy, settings)
        changes: dict[str, Any] = {
            "accuracy": Number(value=0.1 + gain * factor + shift, kind="emulated"),
            "eval_loss": Number(value=4.0 - loss_gain * factor, kind="emulated"),
            "wall_seconds": 0.01 * steps,
        }
        return outcome.model_copy(update=changes)

    return measure


def outcome(start: float, end: float, *, loss: tuple[float, float] = (2.0, 1.0)) -> Outcome:
    first, last = (Number(value=value, kind="measured") for value in (start, end))
    start_loss, end_loss = (Number(value=value, kind="measured") for value in loss)
    return Outcome(kind="ok", start_accuracy=first, accuracy=last, start_eval_loss=start_loss, eval_loss=end_loss)


@pytest.mark.parametrize(
    ("runs", "is_shown"),
    [
        ([outcome(0.1, 0.80), outcome(0.12, 0.78), outcome(0.08, 0.81), outcome(0.1, 0.79)], True),
        ([outcome(0.5, 0.5443), outcome(0.58, 0.5443), outcome(0.47, 0.5443), outcome(0.56, 0.5443)], False),
        ([outcome(0.5, 0.5)] * 4, False),
        ([outcome(0.5, 0.4), outcome(0.5, 0.3), outcome(0.5, 0.4), outcome(0.5, 0.3)], False),
    ],
    ids=["learned", "the base rate on every seed", "nothing changed", "unlearned"],
)
def test_a_gain_is_shown_where_its_bound_is_three_margins(runs: list[Outcome], is_shown: bool) -> None:
    assert what_was_learned(runs, RELATIVE, Metric(resolution=0.01), num_steps=40).is_shown == is_shown


def test_an_absolute_margin_asks_for_three_times_itself() -> None:
    runs = [outcome(0.1, 0.25), outcome(0.1, 0.26), outcome(0.1, 0.24), outcome(0.1, 0.25)]
    assert not what_was_learned(runs, Proof(margin=0.05), Metric(), num_steps=40).is_shown
    assert what_was_learned(runs, Proof(margin=0.04), Metric(), num_steps=40).is_shown


@pytest.mark.parametrize("scale", [1e-7, 1.0, 409.0])
def test_a_loss_of_any_size_is_held_to_what_was_learned_of_it(scale: float) -> None:
    """The same verdicts for a loss times 1e-7 and for one of 409: the margin is a share of the gain."""
    metric = Metric("held-out loss", higher_is_better=False, is_loss=True)

    def run(last: float, *, is_fp32: bool) -> Outcome:
        found = outcome(-2.0 * scale, -last * scale, loss=(2.0 * scale, last * scale))
        return found if is_fp32 else found.model_copy(update={"start_accuracy": None, "start_eval_loss": None})

    noise = [0.01, -0.01, 0.005, -0.005]
    from test_verification import CONTENDERS

    verdicts = []
    for harm in (0.0, 0.3):
        known = {("a", i): run(1.0 + e, is_fp32=True) for i, e in enumerate(noise)}
        known |= {("c", i): run(1.0 + e / 2 + harm, is_fp32=False) for i, e in enumerate(noise)}
        learned = what_was_learned([known["a", i] for i in range(4)], RELATIVE, metric, num_steps=40)
        verdict = judge(CONTENDERS[2], CONTENDERS[0], known, 4, RELATIVE, metric, learned, level=0.02)
        verdicts.append(verdict.kind)
        assert verdict.margin == pytest.approx(0.1 * scale)
    assert verdicts == ["proved", "refuted"]


def test_where_fp32_gains_nothing_the_runs_are_doubled_up_to_the_limit_and_no_arm_is_trained(tmp_path: Path) -> None:
    found = prove(tmp_path, learner(0.0, noise=0.02), proof=RELATIVE)
    assert [each.num_steps for each in found.history] == [40, 80, 160, 320]
    assert {v.kind for name, v in found.verdicts.items() if name != "fp32"} == {"insensitive"}
    assert not found.outcomes["trial 7"]
    assert len(found.outcomes["fp32"]) == 8  # the seeds of both looks, at the longest length


def test_the_length_at_which_the_gain_shows_is_that_of_all_arms(tmp_path: Path) -> None:
    found = prove(tmp_path, learner(0.002, noise=0.006, per_step=True, loss_gain=0.05), proof=RELATIVE)
    assert found.num_steps > 40
    assert found.learned is not None
    assert found.learned.is_shown
    assert len(found.outcomes["trial 7"]) >= 4
    assert found.verdicts["trial 7"].kind != "insensitive"


def test_runs_are_made_longer_only_while_the_proof_has_time(tmp_path: Path) -> None:
    proof = Proof(looks=(4,), num_steps=40, max_steps=320, max_seconds=12.0)
    found = prove(tmp_path, learner(0.0, noise=0.02), proof=proof)
    # 4 runs of .4 s are made; 3 arms x 4 seeds of .8 s fit into 12 s, of 1.6 s they do not
    assert [each.num_steps for each in found.history] == [40, 80]


def test_a_metric_that_never_differs_needs_a_loss_that_fp32_lowered(tmp_path: Path) -> None:
    lowered = prove(tmp_path / "a", learner(0.17, noise=0.0), proof=RELATIVE)
    assert lowered.verdicts["trial 7"].kind == "proved"
    not_lowered = prove(tmp_path / "b", learner(0.17, noise=0.0, loss_gain=0.01), proof=RELATIVE)
    assert not_lowered.verdicts["trial 7"].kind == "insensitive"
    assert "never differs" in not_lowered.verdicts["trial 7"].reason


def test_runs_in_which_no_arm_ever_differs_are_made_longer_and_perfect_ones_are_not(tmp_path: Path) -> None:
    """A language model that predicts the most frequent character has FP32's accuracy to the last digit."""
    found = prove(tmp_path / "a", learner(0.17, noise=0.0), proof=RELATIVE)
    assert (found.num_steps, [each.num_steps for each in found.history]) == (320, [40, 80, 160, 320])
    again = prove(tmp_path / "a", FakeMeasure(stop_at=1), proof=RELATIVE)  # all is there, and the length as it was
    assert again.verdicts == found.verdicts
    assert prove(tmp_path / "b", learner(0.9, noise=0.0), proof=RELATIVE).num_steps == 40


def test_a_policy_that_learns_nothing_is_not_proved_beside_an_fp32_that_learned_a_little(tmp_path: Path) -> None:
    """A long warm-up: FP32 goes from .41 to .52, the policy flushes all gradients and stays at .41."""

    def measure(policy: Policy, settings: TrialSettings) -> Outcome:
        found = learner(0.11, noise=0.004)(policy, settings)
        if policy == FOUND:
            stuck = {"accuracy": Number(value=0.1, kind="emulated"), "eval_loss": Number(value=4.0, kind="emulated")}
            return found.model_copy(update=stuck)
        return found

    assert prove(tmp_path, measure, proof=RELATIVE).verdicts["trial 7"].kind == "refuted"


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("timeout", "open"),
        ("crashed", "open"),
        ("out_of_memory", "open"),
        ("unsupported", "failed"),
        ("user_error", "failed"),
        ("non_finite_loss", "refuted"),
        ("scale_collapsed", "refuted"),
    ],
)
def test_only_ends_that_speak_of_precision_refute(tmp_path: Path, kind: EndKind, expected: str) -> None:
    found = prove(tmp_path, FakeMeasure(noise=0.001, fail=lambda p: kind if p == FOUND else None))
    verdict = found.verdicts["trial 7"]
    assert verdict.kind == expected
    assert kind in verdict.reason
    assert len(found.outcomes["trial 7"]) == 1


def test_fp32_that_runs_out_of_time_leaves_all_open_and_no_arm_is_trained(tmp_path: Path) -> None:
    found = prove(tmp_path, FakeMeasure(fail=lambda p: "timeout"))
    assert found.verdicts["trial 7"].kind == "open"
    assert "FP32 itself ran out of time" in found.verdicts["trial 7"].reason
    assert not found.outcomes["trial 7"]


def test_the_steps_that_would_do_follow_the_growth_of_the_gain() -> None:
    def gained(num_steps: int, mean: float) -> Sensitivity:
        ends = [mean + e for e in (0.03, -0.03, 0.02, -0.02)]
        return what_was_learned([outcome(0.5, 0.5 + e) for e in ends], RELATIVE, Metric(), num_steps=num_steps)

    first, second = gained(40, 0.01), gained(80, 0.02)
    assert not second.is_shown
    # in proportion to the steps; half-width .047, and .7 of the gain must exceed it: .08 at 320 steps does
    assert steps_needed([first, second], RELATIVE) == 320
    assert steps_needed([gained(40, 0.0), gained(80, -0.01)], RELATIVE) is None


def test_metrics_keep_their_own_name_and_sign() -> None:
    task = Task(name="t", model=nn.Identity, train_batches=[1], eval_batches=[1], loss=lambda m, b: torch.tensor(0.0))
    metric = metric_of(task)
    assert (metric.name, metric.higher_is_better, metric.is_loss) == ("held-out loss", False, True)
    shown = metric.own(Number(value=-409.2, kind="measured", low=-410.0, high=-408.0))
    assert (shown.value, shown.low, shown.high) == (409.2, 408.0, 410.0)


def task_at(lr: float) -> Task:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8, 32, 16, generator=generator)
    batches = list(zip(x, (x.sum(2) > 0).long(), strict=True))
    return Task(
        name="rate",
        model=lambda: nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 2)),
        train_batches=batches,
        eval_batches=batches[:2],
        loss=lambda m, b: nn.functional.cross_entropy(m(b[0]), b[1]),
        metric=lambda m, b: (m(b[0]).argmax(1) == b[1]).float().mean(),
        optimizer_settings={"lr": lr},
    )


@pytest.mark.parametrize(
    ("lr", "verdict"), [(1e-12, "insensitive"), (1e-2, "proved")], ids=["nothing learned", "learned"]
)
def test_a_real_training_is_proved_where_it_learns_and_not_where_it_does_not(
    tmp_path: Path, lr: float, verdict: str
) -> None:
    task = task_at(lr)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = verify_policy(
            Policy(default="autocast", dtype="bf16"),
            task,
            output=tmp_path,
            device="cpu",
            proof_steps=80,
            measure=lambda policy, settings: run_trial(task, policy, settings),
        )
    assert found.verdict.kind == verdict
    if verdict == "insensitive":
        assert "no gain is shown" in found.sentence
        assert not found.is_proved
        assert not found.is_worse
