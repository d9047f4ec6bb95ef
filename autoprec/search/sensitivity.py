"""Whether FP32 itself learned enough in the runs of a proof for a margin to mean something (assay sensitivity).

A policy that learns nothing is not worse than an FP32 that learned nothing. So FP32's gain over its start weights is
measured on the seeds of the proof and must be shown, by the bounds that the arms are judged by, to be several margins
(`Proof.sensitivity`). ICH E10 names the idea; here the start weights take the place of the placebo.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from autoprec.search.metric import Metric
from autoprec.search.proof import Proof
from autoprec.search.statistics import Interval, interval
from autoprec.trials.outcome import Outcome

__all__ = ["Gain", "Sensitivity", "steps_needed", "what_was_learned"]

LOSS_RESOLUTION = 1e-6
"""Rounding of a loss that is summed up in FP32, relative: less is no change."""
MAX_FACTOR = 1024
"""Longer runs than this many times the longest that was made are not forecast."""


@dataclass(frozen=True, slots=True)
class Gain:
    """What FP32 gained over its start weights in one held-out number, larger is better.

    Attributes:
        interval: over the seeds; the half-width is one-sided, at the error of a look.
        start: mean at the start weights, as the study stores it.
        margin: what an arm may lose of it, in the same units.
        is_shown: whether it is shown to be large enough for the margin.
    """

    interval: Interval
    start: float
    margin: float
    is_shown: bool


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """What FP32 gained in runs of `num_steps`.

    `metric` and `loss` are None where a run gave no number for one; `steps_needed` are those in which the gain would
    probably show, None where it shows or that is not in sight.
    """

    num_steps: int
    metric: Gain | None = None
    loss: Gain | None = None
    steps_needed: int | None = None

    @property
    def is_shown(self) -> bool:
        """Whether an arm can be proved on these runs: the metric itself has to have moved."""
        return self.metric is not None and self.metric.is_shown

    @property
    def loss_is_shown(self) -> bool:
        return self.loss is not None and self.loss.is_shown


def what_was_learned(runs: Sequence[Outcome], proof: Proof, metric: Metric, *, num_steps: int) -> Sensitivity:
    """Compare FP32's runs with their own start weights; nothing is shown where one of them gave no number."""
    metrics = [(o.start_accuracy.value, o.accuracy.value) for o in runs if o.start_accuracy and o.accuracy]
    losses = [(-o.start_eval_loss.value, -o.eval_loss.value) for o in runs if o.start_eval_loss and o.eval_loss]
    found = Sensitivity(num_steps)
    if len(runs) < 2 or len(metrics) < len(runs):
        return found
    loss = _gain(losses, proof, margin=None, least=proof.min_loss_gain) if len(losses) == len(runs) else None
    least = proof.min_loss_gain if metric.is_loss else 0.0
    own = _gain(metrics, proof, margin=proof.margin, least=least, resolution=metric.resolution)
    return Sensitivity(num_steps, own, loss)


def _gain(
    pairs: Sequence[tuple[float, float]],
    proof: Proof,
    *,
    margin: float | None,
    least: float,
    resolution: float = 0.0,
) -> Gain:
    start = math.fsum(first for first, _ in pairs) / len(pairs)
    step = max(resolution, LOSS_RESOLUTION * abs(start))
    found = interval([last - first for first, last in pairs], alpha=proof.alpha_per_look, resolution=step)
    allowed = proof.max_lost_share * max(0.0, found.mean) if margin is None else margin
    is_shown = found.low > 0 and found.low >= proof.sensitivity * allowed and found.mean >= least * abs(start)
    return Gain(found, start, allowed, is_shown)


def steps_needed(history: Sequence[Sensitivity], proof: Proof) -> int | None:
    """Return in how many steps, a doubling of the longest, FP32's gain would probably show; None: none in sight.

    The mean gain goes on as the power of the steps that its last two lengths follow (in proportion to the steps where
    there is but one), its spread stays.
    """
    known = [(each.num_steps, each.metric) for each in history if each.metric is not None]
    if not known or known[-1][1].interval.mean <= 0:
        return None
    steps, last = known[-1]
    power = 1.0
    if len(known) > 1 and known[-2][1].interval.mean > 0:
        grown = last.interval.mean / known[-2][1].interval.mean
        power = min(1.5, math.log(grown) / math.log(steps / known[-2][0]))
    if power <= 0.1:
        return None
    for doublings in range(1, MAX_FACTOR.bit_length()):
        mean = last.interval.mean * 2.0 ** (power * doublings)
        allowed = proof.max_lost_share * mean if proof.margin is None else proof.margin
        if mean - last.interval.half_width >= proof.sensitivity * allowed:
            return steps << doublings
    return None
