"""GradScaler's rule replayed over recorded gradient maxima: what a setting would have done, without training again."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice

import numpy as np

from autoprec.policy import GradScalerSettings

__all__ = ["ScaleReplay", "replay_scaler", "headroom_octaves", "HALF_LIMIT"]

HALF_LIMIT = 65520.0
"""From here on a value rounds to infinity in FP16: 65504, its largest, and half a unit in the last place."""


@dataclass(frozen=True, slots=True)
class ScaleReplay:
    """What the scaler did at each step.

    Attributes:
        scales: the scale of each step's backward pass.
        skipped: whether the step was skipped.
        final_scale: the scale after the last step.
    """

    scales: tuple[float, ...]
    skipped: tuple[bool, ...]
    final_scale: float

    @property
    def skip_rate(self) -> float:
        return sum(self.skipped) / len(self.skipped) if self.skipped else 0.0

    @property
    def mean_octave(self) -> float:
        """Mean of log2 of the scale; a scale of 0 counts as FP32's smallest."""
        smallest = 2.0**-149
        return math.fsum(math.log2(max(scale, smallest)) for scale in self.scales) / max(1, len(self.scales))


def replay_scaler(
    maxima: Sequence[float],
    settings: GradScalerSettings,
    *,
    num_steps: int | None = None,
    limit: float = HALF_LIMIT,
) -> ScaleReplay:
    """Replay `torch.amp.GradScaler` with `settings`.

    As in torch the scale is an FP32 number, rounded after each update; growth that would leave FP32's range keeps the
    scale and restarts the count; a scale of 0 stays 0.

    Args:
        maxima: the largest magnitude of each step's gradients, not scaled; NaN or infinity overflows at any scale.
        num_steps: steps to replay; more than there are maxima goes through them again from the start.
        limit: a scaled maximum from here on overflows.
    """
    scale, tracker = np.float32(settings.init_scale), 0
    scales: list[float] = []
    skipped: list[bool] = []
    with np.errstate(over="ignore", invalid="ignore"):
        for maximum in _steps(maxima, num_steps):
            scales.append(float(scale))
            skipped.append(not np.float32(maximum) * scale < limit)
            if skipped[-1]:
                scale, tracker = np.float32(scales[-1] * settings.backoff_factor), 0
                continue
            tracker += 1
            if tracker == settings.growth_interval:
                scale, tracker = _grown(scale, settings.growth_factor), 0
    return ScaleReplay(tuple(scales), tuple(skipped), float(scale))


def headroom_octaves(maximum: float, scale: float) -> float | None:
    """Return by how many doublings a gradient of this magnitude stays below FP16's largest; None for 0 or no number."""
    scaled = maximum * scale
    return math.log2(65504.0 / scaled) if 0.0 < scaled < math.inf else None


def _steps(maxima: Sequence[float], num_steps: int | None) -> Iterator[float]:
    return iter(maxima) if num_steps is None else islice(cycle(maxima), num_steps)


def _grown(scale: np.float32, factor: float) -> np.float32:
    grown = np.float32(float(scale) * factor)
    return grown if np.isfinite(grown) else scale
