"""When a trial ends before its time: what can no longer become feasible is not worth its remaining steps.

What is impossible (a loss that is not finite, an operator that is refused, a collapsed scale) ends a trial at the step
where it comes up, whatever the rules. The rules here are a search's own, since Optuna prunes no study with several
objectives.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["AbortRules", "loss_scale", "training_loss_gap"]

LOSS_STEPS = 20
"""Before so many steps the training loss says too little: some are skipped, and the rate may still be warming up."""
LOSS_WINDOW = 8
"""Steps whose mean is compared."""
LOSS_FACTOR = 2.0
"""Held-out and training loss differ: only a gap of so many times the allowed one ends a trial."""


class AbortRules(BaseModel):
    """What ends a trial early. `reference_losses` are FP32's, step by step, on the same weights and batches."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    max_skip_rate: float = Field(ge=0)
    max_loss_gap: float = Field(ge=0)
    reference_losses: tuple[float, ...] = ()

    def reason(self, losses: Sequence[float], *, num_skipped: int, num_steps: int) -> str:
        """Say why a trial of `num_steps` that has had these losses cannot become feasible; "" where it still may."""
        allowed = self.max_skip_rate * num_steps
        if num_skipped > allowed:
            return f"{num_skipped} of {len(losses)} steps were skipped; {allowed:g} of {num_steps} are allowed"
        gap = training_loss_gap(losses, self.reference_losses) if len(losses) >= LOSS_STEPS else None
        if gap is not None and gap > LOSS_FACTOR * self.max_loss_gap:
            return f"the training loss is {gap:.0%} above FP32's on the same batches at step {len(losses)}"
        return ""


def training_loss_gap(losses: Sequence[float], reference: Sequence[float]) -> float | None:
    """Return how far the last steps' mean loss lies above the reference's of the same steps, relative to it.

    None before `LOSS_WINDOW` steps, or where the reference has not gone as far.
    """
    end = len(losses)
    if end < LOSS_WINDOW or len(reference) < end:
        return None
    own, other = (math.fsum(values[end - LOSS_WINDOW : end]) / LOSS_WINDOW for values in (losses, reference))
    return (own - other) / loss_scale(other, reference)


def loss_scale(loss: float, reference: Sequence[float]) -> float:
    """Return the size that a difference of losses is told in: the loss, or a thousandth of the largest before it.

    A loss that has come near 0 makes any difference look large; one that is small throughout (of units of 1e-7) is not
    near 0.
    """
    return max(abs(loss), 1e-3 * max(map(abs, reference), default=0.0)) or 1.0
