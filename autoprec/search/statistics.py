"""Paired differences and their one-sided Student intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from scipy.special import stdtrit  # type: ignore[import-untyped]

__all__ = ["PairedDifference", "paired_difference"]


@dataclass(frozen=True, slots=True)
class PairedDifference:
    """Mean of paired differences; `half_width` is what a one-sided bound at the asked level adds or takes away."""

    num_pairs: int
    mean: float
    half_width: float

    @property
    def low(self) -> float:
        return self.mean - self.half_width

    @property
    def high(self) -> float:
        return self.mean + self.half_width


def paired_difference(differences: Sequence[float], *, alpha: float, resolution: float = 0.0) -> PairedDifference:
    """Return the mean and the one-sided half-width at level `alpha` (each side on its own).

    Args:
        differences: at least two, one a pair.
        alpha: chance that the true mean lies below `low`.
        resolution: the smallest step of the metric; the standard deviation is never taken below what rounding to it
            leaves uncertain, resolution / sqrt(12), so that equal figures do not prove a margin of zero.
    """
    n = len(differences)
    if n < 2:
        raise ValueError(f"{n} pairs; a spread needs at least 2")
    mean = math.fsum(differences) / n
    variance = math.fsum((d - mean) ** 2 for d in differences) / (n - 1)
    deviation = max(math.sqrt(variance), resolution / math.sqrt(12))
    return PairedDifference(n, mean, float(stdtrit(n - 1, 1 - alpha)) * deviation / math.sqrt(n))
