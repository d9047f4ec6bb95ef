"""Which scaler settings a profile speaks for: a window for init_scale, and the rest by replay over a long run."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autoprec.policy import GradScalerSettings
from autoprec.probes.ranges import ExponentHistogram
from autoprec.profiling.profile import Profile
from autoprec.profiling.scaler_replay import replay_scaler

__all__ = ["ScaleWindow", "choose_scaler", "judge_scaler", "scale_window"]

HEADROOM_OCTAVES = 1
"""Gradients may double before a scale inside the window overflows."""
FLUSHED_TOLERANCE = 1e-3
"""A scale that flushes this share more than the largest safe scale does is below the window."""
REPLAYED_STEPS = 6_000
"""Three of torch's growth intervals: what no short trial can see."""
WORTH = 1e-3
"""Skipped steps and flushed gradients, as shares; less is no reason to leave torch's defaults."""
OCTAVES = range(-14, 25)


@dataclass(frozen=True, slots=True)
class ScaleWindow:
    """Scales (powers of two) from `low` to `high` neither overflow nor flush more than they must.

    `headroom_octaves` is how often the largest gradient can double at torch's default of 65536; negative: it overflows.
    """

    low: float
    high: float
    headroom_octaves: float | None

    def holds(self, scale: float) -> bool:
        return self.low <= scale <= self.high

    def distance(self, scale: float) -> tuple[float, float]:
        """Order scales: octaves outside the window first; inside, the larger before the smaller, outside the smaller.

        A scale above the window overflows, one below it flushes a few gradients more.
        """
        outside = max(0.0, math.log2(self.low / scale), math.log2(scale / self.high))
        return outside, scale if outside else -scale


def scale_window(gradients: ExponentHistogram) -> ScaleWindow:
    """Return the safe window of a loss scale for gradients of these magnitudes."""
    if gradients.maximum <= 0:
        return ScaleWindow(2.0 ** OCTAVES[0], 2.0 ** OCTAVES[-1], None)
    room = math.log2(65504.0 / gradients.maximum)
    high = min(max(math.floor(room) - HEADROOM_OCTAVES, OCTAVES[0]), OCTAVES[-1])
    least = gradients.share_below(2.0**high)
    low = next(o for o in OCTAVES if o >= high or gradients.share_below(2.0**o) <= least + FLUSHED_TOLERANCE)
    return ScaleWindow(2.0**low, 2.0**high, room - 16.0)


def judge_scaler(
    maxima: Sequence[float],
    gradients: ExponentHistogram,
    settings: GradScalerSettings,
    *,
    num_steps: int = REPLAYED_STEPS,
) -> float:
    """Return what a setting costs over a long run: share of skipped steps plus mean share of flushed gradients."""
    replay = replay_scaler(maxima, settings, num_steps=num_steps)
    flushed = {scale: gradients.share_below(scale) if scale > 0 else 1.0 for scale in set(replay.scales)}
    return replay.skip_rate + math.fsum(flushed[scale] for scale in replay.scales) / len(replay.scales)


def choose_scaler(profile: Profile, choices: Mapping[str, Sequence[float]]) -> GradScalerSettings:
    """Choose among `choices` (name of a setting -> its values; absent: torch's default) by window and replay.

    Torch's defaults stay unless another setting saves at least `WORTH` of steps and gradients.
    """
    gradients = profile.gradients
    window = scale_window(gradients)
    maxima = whole_maxima(profile)
    default = GradScalerSettings()
    scales = choices.get("init_scale", [default.init_scale])
    start = default.init_scale if window.holds(default.init_scale) else min(scales, key=window.distance)
    best = GradScalerSettings(init_scale=start)
    cost = judge_scaler(maxima, gradients, best)
    names = [name for name in ("growth_factor", "backoff_factor", "growth_interval") if name in choices]
    for values in itertools.product(*(choices[name] for name in names)):
        settings = GradScalerSettings.model_validate({"init_scale": start, **dict(zip(names, values, strict=True))})
        other = judge_scaler(maxima, gradients, settings)
        if other < cost - WORTH:
            best, cost = settings, other
    return best


def whole_maxima(profile: Profile) -> list[float]:
    """Return each step's largest gradient of all: activations' gradients overflow too, and only some steps saw them."""
    known = max(profile.gradient_maxima, default=0.0)
    factor = max(1.0, profile.gradients.maximum / known) if known > 0 else 1.0
    return [maximum * factor for maximum in profile.gradient_maxima]
