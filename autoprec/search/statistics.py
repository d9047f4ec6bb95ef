"""Means of a few values, paired differences above all, and their one-sided Student bounds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from scipy.special import stdtrit  # type: ignore[import-untyped]

__all__ = ["Interval", "interval", "num_values_needed"]

MAX_VALUES = 1_000
"""No proof is planned with more seeds than this."""


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
    return Interval(n, mean, _half_width(deviation, n, alpha))


def num_values_needed(deviation: float, margin: float, *, alpha: float) -> int | None:
    """Return how many values of this standard deviation make the one-sided half-width smaller than `margin`.

    None where more than `MAX_VALUES` would be needed.
    """
    if deviation <= 0:
        return 2
    enough = (n for n in range(2, MAX_VALUES + 1) if _half_width(deviation, n, alpha) < margin)
    return next(enough, None)


def _half_width(deviation: float, n: int, alpha: float) -> float:
    return float(stdtrit(n - 1, 1 - alpha)) * deviation / math.sqrt(n)
