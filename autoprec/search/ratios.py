"""Memory and throughput of an arm over FP32's: one kind with one kind, with an interval where pairs were measured."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from autoprec.policy import Number
from autoprec.search.statistics import interval
from autoprec.trials.outcome import Outcome

__all__ = ["NO_RATIOS", "Ratios", "counted", "outcome_ratios", "paired_ratios"]

ALPHA = 0.025
"""Each side of a two-sided 95 % interval; shared by the arms of a proof, so that it holds for all of them together."""


@dataclass(frozen=True, slots=True)
class Ratios:
    """Memory and throughput over FP32's; None where one of the two has no number, or another kind of number."""

    memory: Number | None = None
    throughput: Number | None = None


NO_RATIOS = Ratios()


def outcome_ratios(outcome: Outcome, reference: Outcome) -> Ratios:
    """Return the ratios of two single outcomes, without intervals."""
    return Ratios(
        _ratio(outcome.peak_memory_bytes, reference.peak_memory_bytes),
        _ratio(outcome.throughput_samples_per_second, reference.throughput_samples_per_second),
    )


def paired_ratios(runs: Mapping[int, Outcome], reference: Mapping[int, Outcome], *, num_arms: int = 1) -> Ratios:
    """Return the ratios over the seeds that both arms have: geometric means, with intervals where measured.

    Numbers that are computed or predicted are the same for every seed: they have no spread, and none is claimed.

    Args:
        num_arms: how many arms are compared with the reference; the intervals hold for all together (Bonferroni).
    """
    pairs = [outcome_ratios(runs[index], reference[index]) for index in sorted(runs.keys() & reference.keys())]
    alpha = ALPHA / num_arms
    return Ratios(_pooled([pair.memory for pair in pairs], alpha), _pooled([pair.throughput for pair in pairs], alpha))


def counted(ratio: Number | None) -> float:
    """Return what a ratio counts for: the end of its interval nearest to 1, so that noise is never a gain."""
    if ratio is None:
        return 1.0
    low, high = ratio.value if ratio.low is None else ratio.low, ratio.value if ratio.high is None else ratio.high
    return min(max(1.0, low), high)


def _ratio(number: Number | None, reference: Number | None) -> Number | None:
    if number is None or reference is None or number.kind != reference.kind:
        return None
    if number.value <= 0 or reference.value <= 0:
        return None
    return Number(value=number.value / reference.value, kind=number.kind)


def _pooled(ratios: list[Number | None], alpha: float) -> Number | None:
    known = [ratio for ratio in ratios if ratio is not None]
    if not known or len(known) < len(ratios) or len({ratio.kind for ratio in known}) > 1:
        return None
    if known[0].kind != "measured" or len(known) < 2:
        return known[0]
    found = interval([math.log(ratio.value) for ratio in known], alpha=alpha)
    return Number(value=math.exp(found.mean), kind="measured", low=math.exp(found.low), high=math.exp(found.high))
