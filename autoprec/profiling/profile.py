"""A profile as data: what a few instrumented FP32 steps told about each unit. Strict JSON, written whole or never."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from autoprec.errors import PolicyError, StudyError
from autoprec.policy import LowPrecision, Precision, write_atomically
from autoprec.policy.strict_json import parse_strict_json
from autoprec.probes.ranges import ExponentHistogram

__all__ = ["HalfError", "PrecisionCost", "Profile", "ProfileSettings", "UnitProfile"]

LARGEST_HALF = 65504.0


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class ProfileSettings(_Frozen):
    """How a profile is taken: `num_steps` FP32 steps; the first and one more, on the hardest batch, are watched."""

    num_steps: int = Field(default=4, ge=1)
    loss_scale: float = Field(default=65536.0, gt=0)


class PrecisionCost(_Frozen):
    """What a unit takes of one training step at the target shape, every unit in the same precision.

    `seconds` is predicted; `peak_bytes`, computed, is the unit's part of the step's peak.
    """

    seconds: float
    peak_bytes: float


class HalfError(_Frozen):
    """What a unit loses in one half, computed in it as a trial does; the other units stay in FP32.

    Attributes:
        forward, gradient: expected change of the loss by its output, and by its gradient, relative to the loss.
        output: difference of its output as a share of the output's size.
        overflows: its output was not finite.
    """

    forward: float = 0.0
    gradient: float = 0.0
    output: float = 0.0
    overflows: bool = False


class UnitProfile(_Frozen):
    """One unit.

    Attributes:
        activations, activation_gradients, parameter_gradients: octaves, over all instrumented steps.
        half: dtype -> what it loses in it.
        output_elements: of one output at the target shape, scaled from the shape of the steps.
        cast_seconds: predicted cost of casting its output, forward and backward: a * elements + b.
        costs: precision -> time and memory.
    """

    activations: ExponentHistogram = ExponentHistogram()
    activation_gradients: ExponentHistogram = ExponentHistogram()
    parameter_gradients: ExponentHistogram = ExponentHistogram()
    half: dict[LowPrecision, HalfError] = Field(default_factory=dict)
    output_elements: int = 0
    cast_seconds: float = 0.0
    costs: dict[Precision, PrecisionCost] = Field(default_factory=dict)

    def error_score(self, dtype: LowPrecision = "fp16") -> float:
        """Return both errors together: the expected relative change of the loss where this unit alone is in `dtype`."""
        known = self.half.get(dtype, HalfError())
        return math.hypot(known.forward, known.gradient)

    @property
    def overflows(self) -> bool:
        """Whether its output in FP16 was not finite."""
        return self.half.get("fp16", HalfError()).overflows

    @property
    def headroom_octaves(self) -> float | None:
        """How often its largest activation can double before FP16 overflows; None where all are 0."""
        largest = self.activations.maximum
        return math.log2(LARGEST_HALF / largest) if largest > 0 else None

    def flushed_share(self, scale: float) -> float:
        """Share of its activations' gradients that FP16 flushes to 0 at a loss scale."""
        return self.activation_gradients.share_below(scale)


class Profile(_Frozen):
    """The whole profile.

    Attributes:
        study_name: of the study that it belongs to.
        num_steps: FP32 training steps that were run.
        watched_steps: those that were instrumented; the last repeats the batch of the highest loss.
        losses: of each step.
        gradient_maxima: largest magnitude of the parameters' gradients at each step.
        step_seconds, peak_bytes: precision -> of the whole step at the target shape, every unit in that precision.
        target: name of the GPU that these are for.
        wall_seconds: what the profile took.
    """

    schema_version: int = 2
    study_name: str = ""
    num_steps: int
    watched_steps: list[int]
    losses: list[float]
    gradient_maxima: list[float]
    units: dict[str, UnitProfile]
    step_seconds: dict[Precision, float] = Field(default_factory=dict)
    peak_bytes: dict[Precision, float] = Field(default_factory=dict)
    target: str = ""
    wall_seconds: float = 0.0
    notes: list[str] = Field(default_factory=list)

    @property
    def gradients(self) -> ExponentHistogram:
        """All activations' and parameters' gradients together: what a loss scale must keep inside FP16's range."""
        total = ExponentHistogram()
        for unit in self.units.values():
            total = total + unit.activation_gradients + unit.parameter_gradients
        return total

    def save(self, path: str | os.PathLike[str]) -> None:
        text = json.dumps(self.model_dump(mode="json"), allow_nan=False)
        write_atomically(path, text + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Profile:
        """Read a profile.

        Raises:
            StudyError: no profile, or not one of this version.
        """
        name = Path(path).name
        try:
            data = parse_strict_json(Path(path).read_bytes(), where=name)
            return cls.model_validate(data)
        except (OSError, ValidationError, PolicyError) as error:
            reason = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
            raise StudyError(f"{name}: cannot be read as a profile ({reason}); delete it and run again") from None


def total_cost(units: Mapping[str, UnitProfile], precision: Precision) -> PrecisionCost:
    """Add up the costs of units in one precision; units without a figure count as nothing."""
    known = [unit.costs[precision] for unit in units.values() if precision in unit.costs]
    return PrecisionCost(
        seconds=math.fsum(cost.seconds for cost in known), peak_bytes=math.fsum(cost.peak_bytes for cost in known)
    )
