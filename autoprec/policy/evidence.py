"""What a policy carries beside its rules: settings, the model it was made for, evidence, provenance, recommendation."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, NoReturn, get_args

from pydantic import BaseModel, ConfigDict, Field, field_validator

__all__ = [
    "PRECISIONS",
    "ArmEvidence",
    "Evidence",
    "FrozenDict",
    "FrozenModel",
    "GradScalerSettings",
    "Kind",
    "LowPrecision",
    "ModelInfo",
    "ModuleInfo",
    "Number",
    "OptimizerImplementation",
    "OptimizerSettings",
    "Precision",
    "Provenance",
    "Recommendation",
    "TrainingOptions",
    "UnitEvidence",
    "VerificationEvidence",
]

Precision = Literal["fp32", "autocast", "fp16", "bf16"]
LowPrecision = Literal["fp16", "bf16"]
OptimizerImplementation = Literal["foreach", "fused", "for-loop"]
Kind = Literal["measured", "emulated", "computed", "predicted"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
MAX_SCALE = (2 - 2**-23) * 2.0**127
"""FP32's largest number: torch keeps the scale as a tensor of that type."""
MAX_COUNT = 2**31 - 1
"""torch keeps the growth tracker, which counts up to the interval, as an int32 tensor."""


class FrozenDict(dict[str, Any]):
    """A dict that keeps its order, pickles and copies, and refuses to change."""

    def _refuse(self, *args: object, **kwargs: object) -> NoReturn:
        raise TypeError("a policy is a frozen value; make a new one with policy.replace(...)")

    __setitem__ = __delitem__ = update = setdefault = pop = popitem = clear = __ior__ = _refuse

    def __reduce__(self) -> tuple[Any, ...]:
        return (FrozenDict, (dict(self),))

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(self.items()))


class FrozenModel(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, strict=True, protected_namespaces=())

    @field_validator("*", mode="after")
    @classmethod
    def _freeze(cls, value: Any) -> Any:
        return FrozenDict(value) if type(value) is dict else value


class Number(FrozenModel):
    """One number and where it comes from. `low` and `high` bound a confidence interval where there is one."""

    value: float
    kind: Kind
    low: float | None = None
    high: float | None = None


class GradScalerSettings(FrozenModel):
    """The four numbers of `torch.amp.GradScaler`, with torch's own defaults."""

    init_scale: float = Field(default=65536.0, gt=0, le=MAX_SCALE)
    growth_factor: float = Field(default=2.0, gt=1)
    backoff_factor: float = Field(default=0.5, gt=0, lt=1)
    growth_interval: int = Field(default=2000, ge=1, le=MAX_COUNT)


class OptimizerSettings(FrozenModel):
    """Optimizer settings that go with a precision; None leaves the optimizer's own default."""

    name: str | None = Field(default=None, max_length=200)
    eps: float | None = Field(default=None, gt=0)
    amsgrad: bool | None = None


class TrainingOptions(FrozenModel):
    """How the training ran beside its precision: what memory, speed and accuracy of the policy were found with.

    Attributes:
        accumulation_steps: micro-batches to one optimizer step.
        checkpoint: modules whose activations are computed again in the backward pass; names or globs.
        channels_last: four-dimensional weights and inputs lie in torch.channels_last.
        tf32: FP32 products, convolutions and recurrent layers in TF32 on CUDA; None leaves torch's own switches.
        optimizer_implementation: None leaves torch's own choice.
        compile: the backend of torch.compile; None ran eagerly.
    """

    accumulation_steps: int = Field(default=1, ge=1, le=MAX_COUNT)
    checkpoint: tuple[str, ...] = ()
    channels_last: bool = False
    tf32: bool | None = None
    optimizer_implementation: OptimizerImplementation | None = None
    compile: str | None = Field(default=None, min_length=1, max_length=100)

    @field_validator("checkpoint", mode="before")
    @classmethod
    def _as_tuple(cls, names: Any) -> Any:
        return tuple(names) if isinstance(names, list) else names

    @field_validator("checkpoint", mode="after")
    @classmethod
    def _check_names(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        check_names(names)
        return names

    @property
    def changed(self) -> dict[str, Any]:
        """The options that differ from an ordinary training."""
        return {name: value for name, value in self if value != type(self).model_fields[name].default}


def check_names(names: Iterable[str]) -> None:
    """Refuse what cannot be a module name or glob, with a ValueError."""
    for name in names:
        if not name or len(name) > 500 or any(ord(character) < 32 for character in name):
            raise ValueError(f"{name[:60]!r} is not a module name or glob (1 to 500 printable characters)")


class ModuleInfo(FrozenModel):
    """What a policy remembers of one module: its class name and the shapes of its own parameters."""

    type: str = Field(max_length=200)
    parameters: dict[str, list[int]] = Field(default_factory=dict)


class ModelInfo(FrozenModel):
    """The model that a policy was found on. `fingerprint` covers names and types, not shapes."""

    name: str = Field(max_length=500)
    fingerprint: str = Field(max_length=128)
    modules: dict[str, ModuleInfo] = Field(default_factory=dict)


class ArmEvidence(FrozenModel):
    """The numbers of one arm (a baseline or the policy); None where nothing was obtained.

    The ratios are over FP32's; they have an interval where they were measured in pairs.
    """

    peak_memory_bytes: Number | None = None
    throughput_samples_per_second: Number | None = None
    throughput_tokens_per_second: Number | None = None
    memory_ratio: Number | None = None
    throughput_ratio: Number | None = None
    accuracy: Number | None = None
    eval_loss: Number | None = None
    note: str = Field(default="", max_length=2_000)


class UnitEvidence(FrozenModel):
    """Why one unit has its precision; the figures are there where a profile gave them."""

    precision: Precision
    reason: str = Field(default="", max_length=2_000)
    headroom_octaves: float | None = None
    flushed_share: float | None = None
    error_score: float | None = None
    saved_bytes: Number | None = None
    saved_seconds: Number | None = None


class VerificationEvidence(FrozenModel):
    """What the proof did: paired runs on unused seeds against FP32. Margins are in units of the metric.

    Attributes:
        margin: how much worse than FP32 the metric may be; None where FP32's gain, which it is a share of, is unknown.
        max_lost_share: the share of FP32's gain over its start weights that `margin` is; None for an absolute margin.
        metric, metric_direction: the metric's own name, and "maximize" or "minimize": accuracies in the evidence have
            its own sign.
        start_accuracy, gain: the metric at FP32's start weights, and what it gained, larger is better, with the
            one-sided bound `gain_low`.
        end_scale_low, end_scale_high: the loss scales that neither overflow nor flush gradients needlessly at FP32's
            trained weights and at the start's together; None where the policy has no use for one.
        end_largest_activation, end_module: the largest activation at FP32's trained weights, and where.
        sensitive: whether that gain is shown to be large enough for the margin; an insensitive proof proves nothing.
        noise: standard deviation of the metric between FP32 and itself from weights moved by a rounding error.
    """

    num_seeds: int = Field(ge=0)
    num_steps: int = Field(ge=0)
    margin: float | None = None
    max_lost_share: float | None = None
    metric: str = Field(default="accuracy", max_length=200)
    metric_direction: Literal["maximize", "minimize"] = "maximize"
    start_accuracy: float | None = None
    gain: float | None = None
    gain_low: float | None = None
    sensitive: bool | None = None
    end_scale_low: float | None = None
    end_scale_high: float | None = None
    end_largest_activation: float | None = None
    end_module: str = Field(default="", max_length=500)
    provable_margin: float | None = None
    loss_margin: float | None = None
    noise: float | None = None
    verdicts: dict[str, str] = Field(default_factory=dict)


class Evidence(FrozenModel):
    """What stands behind a policy.

    `arm` names the one among `arms` that is this policy, `compared_with` the one that its user ran before.
    """

    arm: str = Field(default="", max_length=500)
    compared_with: str = Field(default="", max_length=500)
    arms: dict[str, ArmEvidence] = Field(default_factory=dict)
    units: dict[str, UnitEvidence] = Field(default_factory=dict)
    verification: VerificationEvidence | None = None


class Provenance(FrozenModel):
    """Where a policy comes from. Holds no path, host, user, URL or password."""

    created: str | None = Field(default=None, max_length=64)
    versions: dict[str, str] = Field(default_factory=dict)
    device_type: str | None = Field(default=None, max_length=64)
    device_name: str | None = Field(default=None, max_length=200)
    device_capability: str | None = Field(default=None, max_length=32)
    target_gpu: str | None = Field(default=None, max_length=64)
    emulated: bool | None = None
    task: str | None = Field(default=None, max_length=500)
    study_name: str | None = Field(default=None, max_length=500)
    settings: dict[str, str | int | float | bool | None] = Field(default_factory=dict)


class Recommendation(FrozenModel):
    choice: Literal["policy", "autocast", "fp32", "inconclusive", "unproved"]
    sentence: str = Field(max_length=2_000)
    provisional: bool = False
    prefer: Literal["balanced", "fastest", "smallest"] = "balanced"
