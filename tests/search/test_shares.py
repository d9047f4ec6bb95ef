"""Sharing out the error: whatever the arms, one that is worse than the margin is proved in 5 of 100 studies at most."""

from __future__ import annotations

import numpy as np
import optuna
import pytest
from scipy.special import stdtrit

from autoprec.search.judging import Verdict
from autoprec.search.proof import Proof
from autoprec.search.shares import Shares
from autoprec.search.statistics import Interval

PROOF = Proof(looks=(4,), alpha=0.05, arm_share=0.8)
PROVED = Verdict("proved", Interval(4, 0.0, 0.01), "")
OPEN = Verdict("open", Interval(4, 0.0, 0.1), "")
WORSE = Verdict("refuted", Interval(4, -0.2, 0.1), "")
DIVERGED = Verdict("refuted", None, "a run ended in non_finite_loss")


@pytest.mark.parametrize(
    ("before", "level"),
    [
        ([], 0.04),
        ([PROVED, PROVED], 0.04),
        ([DIVERGED, DIVERGED], 0.04),
        ([OPEN], 0.008),
        ([WORSE, PROVED, OPEN], 0.0016),
    ],
    ids=["first", "proved arms give back", "failed arms were not tested", "open arms have spent", "all of it"],
)
def test_an_arm_has_four_fifths_of_what_those_before_it_left(before: list[Verdict], level: float) -> None:
    shares = Shares(PROOF)
    shares.plan([*(str(i) for i in range(len(before))), "arm"])
    for i, verdict in enumerate(before):
        shares.settle(str(i), verdict)
    assert shares.level("arm") == pytest.approx(level)


def test_an_arm_without_a_verdict_counts_as_spent_and_one_that_was_not_planned_stands_for_itself() -> None:
    shares = Shares(PROOF)
    shares.plan(["a", "b"])
    assert shares.level("b") == pytest.approx(0.008)
    assert shares.level("beside") == pytest.approx(0.05)
    assert shares.in_turn(["beside", "b", "a"]) == ["a", "b", "beside"]


def test_the_order_is_kept_by_the_study_so_that_another_preference_changes_no_share() -> None:
    study = optuna.create_study()
    Shares(PROOF, study).plan(["a", "b"])
    again = Shares(PROOF, study)
    again.plan(["c", "b", "a"])
    assert again.in_turn(["c", "b", "a"]) == ["a", "b", "c"]
    assert Shares(PROOF, study).in_turn(["c", "b", "a"]) == ["a", "b", "c"]


@pytest.mark.parametrize("num_good", [0, 1, 3], ids=["all are worse", "one is equal", "half are equal"])
def test_of_six_arms_none_that_is_worse_by_just_the_margin_is_proved_more_often_than_alpha_says(num_good: int) -> None:
    rng = np.random.default_rng(num_good)
    num_studies, num_arms, margin, sigma = 4_000, 6, 0.02, 0.005
    means = np.array([0.0] * num_good + [-margin] * (num_arms - num_good))
    noise = rng.normal(0, sigma, (num_studies, num_arms, 4)) + rng.normal(0, sigma, (num_studies, 1, 4))  # FP32's own
    values = means[:, None] + noise
    mean, error = values.mean(2), values.std(2, ddof=1) / 2
    num_wrong = num_plain = 0
    for study in range(num_studies):
        shares = Shares(PROOF)
        shares.plan(map(str, range(num_arms)))
        proved = []
        for arm in range(num_arms):
            bound = mean[study, arm] - stdtrit(3, 1 - shares.level(str(arm))) * error[study, arm]
            proved.append(bool(bound > -margin))
            shares.settle(str(arm), PROVED if proved[-1] else OPEN)
        num_wrong += any(proved[num_good:])
        num_plain += bool((mean[study] - stdtrit(3, 0.95) * error[study] > -margin)[num_good:].any())
    assert num_wrong / num_studies <= 0.05 + 3 * (0.05 * 0.95 / num_studies) ** 0.5
    assert num_plain / num_studies > 0.09  # without shares it would be twice as often and more
