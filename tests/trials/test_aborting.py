"""When a trial ends early: too many skipped steps at once, a loss far above FP32's after twenty steps."""

from __future__ import annotations

import pytest

from autoprec.trials.aborting import AbortRules, training_loss_gap

RULES = AbortRules(max_skip_rate=0.25, max_loss_gap=0.5, reference_losses=(1.0,) * 28)


@pytest.mark.parametrize(
    ("losses", "num_skipped", "words"),
    [
        ([1.0] * 7, 7, ""),
        ([1.0] * 8, 8, "8 of 8 steps were skipped; 7 of 28 are allowed"),
        ([9.0] * 19, 0, ""),
        ([9.0] * 12 + [2.0] * 8, 0, ""),
        ([1.0] * 12 + [2.1] * 8, 0, "the training loss is 110% above FP32's on the same batches at step 20"),
        ([0.1] * 27, 0, ""),
    ],
    ids=["as many skips as allowed", "one more", "too early", "just twice the gap", "more", "better"],
)
def test_what_cannot_become_feasible_is_ended_and_nothing_else(
    losses: list[float], num_skipped: int, words: str
) -> None:
    assert RULES.reason(losses, num_skipped=num_skipped, num_steps=28) == words


def test_the_gap_is_that_of_the_last_eight_steps_to_the_same_steps_of_fp32() -> None:
    reference = [8.0] * 10 + [2.0] * 18
    assert training_loss_gap([8.0] * 10 + [3.0] * 10, reference) == pytest.approx(0.5)
    assert training_loss_gap([3.0] * 7, reference) is None
    assert training_loss_gap([3.0] * 29, reference) is None
