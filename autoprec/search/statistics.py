"""Means of a few values, paired differences above all, and their one-sided Student bounds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from scipy.special import stdtrit  # type: ignore[import-untyped]

__all__ = ["Interval", "interval"]


@dataclass(frozen=True, slots=True)
class Interval:
    """Mean of values; `half_width` is what a one-sided bound at the asked level adds or takes away."""

    num_values: int
    mean: float
    half_width: float

    @property
    def low(self) -> float:
        return self.mean - self.half_width

    @property
    def high(self) -> float:
        return self.mean + self.half_width


def interval(values: Sequence[float], *, alpha: float, resolution: float = 0.0) -> Interval:
    """Return the mean and the one-sided half-width at level `alpha` (each side on its own).

    Args:
        values: at least two; differences, one a pair, where two arms are compared.
        alpha: chance that the true mean lies below `low`.
        resolution: the smallest step of the metric; the standard deviation is never taken below what rounding to it
            leaves uncertain, resolution / sqrt(12), so that equal figures do not prove a margin of zero.
    """
    n = len(values)
    if n < 2:
        raise ValueError(f"{n} values; a spread needs at least 2")
    mean = math.fsum(values) / n
    variance = math.fsum((value - mean) ** 2 for value in values) / (n - 1)
    deviation = max(math.sqrt(variance), resolution / math.sqrt(12))
    return Interval(n, mean, float(stdtrit(n - 1, 1 - alpha)) * deviation / math.sqrt(n))
