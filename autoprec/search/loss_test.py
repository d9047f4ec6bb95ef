"""Whether another optimizer setting lowers the loss: two trials on the same start weights and batches, step by step."""

from __future__ import annotations

from autoprec.search.statistics import interval
from autoprec.trials.outcome import Outcome

__all__ = ["lowers_loss"]

ALPHA = 0.05
MIN_STEPS = 8


def lowers_loss(changed: Outcome, default: Outcome) -> bool:
    """Tell whether a change is worth leaving the default: both the held-out loss and the training losses are lower.

    Training losses are paired by step over the second half of the trials; the one-sided 95 % bound of their mean
    difference has to lie below 0.
    """
    if changed.eval_loss is None or default.eval_loss is None or changed.eval_loss.value >= default.eval_loss.value:
        return False
    pairs = list(zip(changed.train_losses, default.train_losses, strict=False))
    differences = [new - old for new, old in pairs[len(pairs) // 2 :]]
    return len(differences) >= MIN_STEPS and interval(differences, alpha=ALPHA).high < 0
