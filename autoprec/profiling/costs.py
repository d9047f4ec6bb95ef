"""Time and memory of each unit in each precision, and of a cast at its border, at the target shape: estimates."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from autoprec.apply.trees import first_tensor
from autoprec.estimates import Roofline, gpu_by_name
from autoprec.policy import Policy, Precision
from autoprec.profiling.profile import PrecisionCost
from autoprec.tasks.protocol import Batch, Task
from autoprec.trials.outcome import TrialSettings
from autoprec.trials.target import target_batch, target_estimate

__all__ = ["ShapeScale", "UnitCosts", "cast_seconds", "unit_costs"]

CASTS = 2
"""One in the forward pass, one of the gradient in the backward pass."""
BYTES_OF_CAST = 6
"""Per element: FP32 read and FP16 written, or the other way."""
UNIFORM: Mapping[Precision, Policy] = {
    "fp32": Policy(default="fp32"),
    "autocast": Policy(default="autocast", dtype="fp16"),
    "fp16": Policy(default="fp16"),
}


@dataclass(frozen=True, slots=True)
class UnitCosts:
    """Costs of a step with every unit in the same precision; a precision that cannot run everywhere is absent."""

    units: Mapping[str, dict[Precision, PrecisionCost]]
    step_seconds: dict[Precision, float] = field(default_factory=dict)
    peak_bytes: dict[Precision, float] = field(default_factory=dict)
    target: str = ""
    notes: list[str] = field(default_factory=list)


def unit_costs(task: Task, units: Sequence[str], settings: TrialSettings) -> UnitCosts:
    """Estimate one step in FP32, under autocast and in half everywhere; modules inside a unit count for it."""
    found: dict[str, dict[Precision, PrecisionCost]] = {name: {} for name in units}
    seconds: dict[Precision, float] = {}
    peaks: dict[Precision, float] = {}
    notes: list[str] = []
    for precision, policy in UNIFORM.items():
        try:
            estimate = target_estimate(task, policy, settings)
        except Exception as error:
            notes.append(f"no costs in {precision}: {type(error).__name__}")
            continue
        seconds[precision] = estimate.step_seconds.value
        peaks[precision] = estimate.peak_memory_bytes.value
        by_seconds = _by_unit(estimate.time.seconds_by_unit, units)
        by_bytes = _by_unit(estimate.memory.by_unit, units)
        for name in units:
            found[name][precision] = PrecisionCost(seconds=by_seconds[name], peak_bytes=by_bytes[name])
    return UnitCosts(found, seconds, peaks, gpu_by_name(settings.gpu).name, notes)


def cast_seconds(num_elements: int, gpu: str) -> float:
    """Return the predicted cost of casting a tensor and its gradient: bytes over bandwidth, and a launch each."""
    roofline, target = Roofline(), gpu_by_name(gpu)
    bandwidth = target.bandwidth_gb_per_second * 1e9 * roofline.bandwidth_share
    return CASTS * (BYTES_OF_CAST * num_elements / bandwidth + roofline.launch_seconds)


def _by_unit(values: Mapping[str, float], units: Sequence[str]) -> dict[str, float]:
    totals = dict.fromkeys(units, 0.0)
    for name, value in values.items():
        while name and name not in totals:
            name = name.rpartition(".")[0]
        if name in totals:
            totals[name] += value
    return totals


@dataclass(frozen=True, slots=True)
class ShapeScale:
    """How many times larger a target batch is: in samples, and in positions (pixels, tokens) of each."""

    samples: float
    positions: float

    @classmethod
    def between(cls, batch: Batch, task: Task) -> Self:
        """Compare the first floating tensor of a training batch with that of the target."""
        if task.target is None:
            return cls(1.0, 1.0)
        here, there = _shape(batch), _shape(target_batch(task))
        if len(here) != len(there) or not here:
            return cls(1.0, 1.0)
        return cls(there[0] / max(1, here[0]), math.prod(there[2:]) / max(1, math.prod(here[2:])))

    def elements(self, shape: tuple[int, ...]) -> int:
        """Scale an output's size: what has more than samples and channels grows with the positions too."""
        factor = self.samples * (self.positions if len(shape) > 2 else 1.0)
        return round(math.prod(shape) * factor) if shape else 0


def _shape(batch: Any) -> tuple[int, ...]:
    tensor = first_tensor(batch)
    return () if tensor is None else tuple(tensor.shape)
