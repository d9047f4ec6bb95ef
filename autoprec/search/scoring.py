"""What a trial is worth to the study: its objectives, and the constraints that make its policy feasible."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from autoprec.trials.aborting import AbortRules, loss_scale, training_loss_gap
from autoprec.trials.outcome import Outcome

__all__ = ["OBJECTIVES", "Limits", "constraint_values", "objective_values"]

OBJECTIVES: Mapping[str, Literal["minimize", "maximize"]] = {
    "peak_memory_bytes": "minimize",
    "throughput_samples_per_second": "maximize",
    "accuracy": "maximize",
}


@dataclass(frozen=True, slots=True)
class Limits:
    """When a trial's policy is feasible.

    `max_loss_gap` is the held-out loss above FP32's, relative to it; `max_skip_rate` the share of skipped steps.
    """

    max_loss_gap: float = 0.5
    max_skip_rate: float = 0.25

    def abort_rules(self, fp32: Outcome) -> AbortRules:
        """Return what ends a trial early: it cannot become feasible any more."""
        return AbortRules(
            max_skip_rate=self.max_skip_rate,
            max_loss_gap=self.max_loss_gap,
            reference_losses=tuple(fp32.train_losses),
        )


def constraint_values(outcome: Outcome, fp32: Outcome, limits: Limits) -> dict[str, float]:
    """Return the constraints, feasible where <= 0: finiteness, skipped steps, held-out loss above FP32's.

    Of an aborted trial the loss is the training's, and absent where it had not come far enough to tell.
    """
    if outcome.kind == "aborted":
        known = training_loss_gap(outcome.train_losses, fp32.train_losses)
        skips = {"finite": -1.0, "skip_rate": outcome.skip_rate - limits.max_skip_rate}
        return skips if skips["skip_rate"] > 0 or known is None else {**skips, "loss_gap": known - limits.max_loss_gap}
    gap = 1.0
    if outcome.is_ok and outcome.eval_loss is not None and fp32.eval_loss is not None:
        reference = fp32.eval_loss.value
        gap = (outcome.eval_loss.value - reference) / loss_scale(reference, fp32.train_losses)
    return {
        "finite": -1.0 if outcome.is_ok else 1.0,
        "skip_rate": outcome.skip_rate - limits.max_skip_rate,
        "loss_gap": (gap if outcome.is_ok else max(gap, 1.0)) - limits.max_loss_gap,
    }


def objective_values(outcome: Outcome, fp32: Outcome) -> list[float]:
    """Return the objectives; where an outcome has none, the finite worst case, so that the sampler learns from it.

    The worst case is twice FP32's memory, no throughput, and an accuracy of 0, or below FP32's by its own size
    where the metric can be negative.
    """
    memory, throughput, accuracy = (
        outcome.peak_memory_bytes,
        outcome.throughput_samples_per_second,
        outcome.accuracy,
    )
    fp32_memory = fp32.peak_memory_bytes.value if fp32.peak_memory_bytes else 0.0
    fp32_accuracy = fp32.accuracy.value if fp32.accuracy else 0.0
    worst = 0.0 if 0.0 <= fp32_accuracy <= 1.0 else fp32_accuracy - max(1.0, abs(fp32_accuracy))
    if not outcome.is_ok:
        return [2 * fp32_memory, 0.0, worst]
    return [
        memory.value if memory else 2 * fp32_memory,
        throughput.value if throughput else 0.0,
        accuracy.value if accuracy else worst,
    ]
