"""What a watched training showed, as plain data: no tensor is kept."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import torch

__all__ = ["Birth", "Flushed", "Observations", "Products", "Updates"]


@dataclass(frozen=True, slots=True)
class Birth:
    """A value that is not finite where no input was so; or NaN where the inputs held inf and no NaN.

    Attributes:
        step: optimizer steps tried before, plus 1.
        unit: the module in whose code, or in whose backward pass, the operator ran.
        operator: its aten name.
        dtype: of the output.
        what: "inf", "-inf" or "NaN".
        cause: "finite values" or "inf".
        backward: whether in a backward pass.
    """

    step: int
    unit: str
    operator: str
    dtype: torch.dtype
    what: str
    cause: str
    backward: bool


@dataclass(slots=True)
class Flushed:
    """Gradient values of one unit that rounded to 0 in half and are not 0 in FP32, by number and by magnitude."""

    num_flushed: int = 0
    num_values: int = 0
    flushed_magnitude: float = 0.0
    magnitude: float = 0.0

    def add(self, other: Flushed) -> None:
        self.num_flushed += other.num_flushed
        self.num_values += other.num_values
        self.flushed_magnitude += other.flushed_magnitude
        self.magnitude += other.magnitude

    @property
    def share(self) -> float:
        return self.num_flushed / max(1, self.num_values)

    @property
    def magnitude_share(self) -> float:
        return self.flushed_magnitude / self.magnitude if self.magnitude > 0 else 0.0


@dataclass(slots=True)
class Updates:
    """Elements of one half parameter that had a gradient at a step, and those that the step left as they were."""

    num_values: int = 0
    num_lost: int = 0

    @property
    def share(self) -> float:
        return self.num_lost / max(1, self.num_values)


@dataclass(slots=True)
class Products:
    """Half products of one unit: operations, and operations once tensor cores have padded the sizes to 8."""

    flops: float = 0.0
    padded_flops: float = 0.0
    sizes: tuple[int, ...] = ()


@dataclass(slots=True, kw_only=True)
class Observations:
    """What was seen; units are module names, "" the model itself.

    Attributes:
        num_steps: optimizer steps that were tried.
        skipped: those of them, from 1, that a grad scaler skipped.
        births: where values stop being finite; the first of each unit, pass and kind.
        half_losses: unit -> loss operators that computed in half.
        half_softmax: units whose softmax computed in half.
        flushed: unit -> gradients that half rounds to 0.
        largest_half: unit -> the largest finite FP16 magnitude of its forward passes.
        products: unit -> products in half.
        saved_bytes: unit -> (bytes in FP32, bytes in half) kept for the first backward pass, parameters left out.
        num_casts, cast_seconds, step_seconds: of all steps; seconds are predicted.
        used_half: half formats that computed.
        losses: at each backward pass, unscaled.
        loss_dtypes: dtypes of the losses.
        scales: the loss scale of each step that a live scaler saw.
        grad_norms: norm of the unscaled gradients at each optimizer step that was taken.
        num_scaled, num_scaler_steps, num_updates, num_backwards: calls of a live scaler, and backward passes.
        clipped_while_scaled: steps whose gradients were clipped before they were unscaled.
        stepped_while_scaled: steps that an optimizer took on gradients that were still scaled.
        stepped_on_non_finite: steps that were taken with non-finite gradients, and the first parameter.
        half_parameters: trainable parameters in less than FP32 -> dtype.
        updates: name of a half parameter -> what its steps changed.
        rounded: unit -> (dtype, a whole number that a cast of the forward pass changed, what it became).
        zero_eps: optimizer -> its eps, which is 0 in the dtype of its state.
        poisoned: buffers that are not finite, and the step at which they became so; parameters likewise.
        half_statistics: normalization layers whose running statistics are in half.
        error: what the training raised; "" where it ended well.
    """

    num_steps: int = 0
    skipped: list[int] = field(default_factory=list)
    births: list[Birth] = field(default_factory=list)
    half_losses: dict[str, str] = field(default_factory=dict)
    half_softmax: dict[str, torch.dtype] = field(default_factory=dict)
    flushed: dict[str, Flushed] = field(default_factory=dict)
    largest_half: dict[str, float] = field(default_factory=dict)
    products: dict[str, Products] = field(default_factory=dict)
    saved_bytes: dict[str, Counter[str]] = field(default_factory=dict)
    num_casts: int = 0
    cast_seconds: float = 0.0
    step_seconds: float = 0.0
    used_half: set[torch.dtype] = field(default_factory=set)
    losses: list[float] = field(default_factory=list)
    loss_dtypes: set[torch.dtype] = field(default_factory=set)
    scales: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    num_scaled: int = 0
    num_scaler_steps: int = 0
    num_updates: int = 0
    num_backwards: int = 0
    clipped_while_scaled: list[int] = field(default_factory=list)
    stepped_while_scaled: list[int] = field(default_factory=list)
    stepped_on_non_finite: dict[int, str] = field(default_factory=dict)
    half_parameters: dict[str, torch.dtype] = field(default_factory=dict)
    updates: dict[str, Updates] = field(default_factory=dict)
    rounded: dict[str, tuple[torch.dtype, float, float]] = field(default_factory=dict)
    zero_eps: dict[str, float] = field(default_factory=dict)
    poisoned_buffers: dict[str, int] = field(default_factory=dict)
    poisoned_parameters: dict[str, int] = field(default_factory=dict)
    half_statistics: dict[str, torch.dtype] = field(default_factory=dict)
    error: str = ""
