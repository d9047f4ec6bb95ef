"""Record the ranges of what flows through a model's units, forward and backward, and what rounding to FP16 does to it.

with watch_ranges(model, names) as log:
    loss(model, batch).backward()
log["layer1"].activations.share_above()
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import nn
from torch.func import functional_call

from autoprec.apply.trees import first_tensor
from autoprec.units.trial_runs import map_tensors

__all__ = ["ExponentHistogram", "UnitRanges", "watch_ranges"]

SMALLEST_EXPONENT = -149
"""Of FP32's smallest magnitude."""
MAX_ELEMENTS = 16_384
"""Elements of one tensor that are counted, evenly spread; its largest magnitude is always that of all."""
FIRST_OVERFLOWING = 16
"""Exponent of the first power of two that FP16 cannot hold (its largest is 65504)."""
LAST_FLUSHED = -26
"""Exponent of the largest magnitudes that all round to 0 in FP16 (below 2**-25, half its smallest)."""


class ExponentHistogram(BaseModel):
    """How many values lie in each octave. `counts[e]` has magnitudes from 2**e to below 2**(e + 1)."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)

    counts: dict[int, int] = Field(default_factory=dict)
    num_zeros: int = 0
    num_non_finite: int = 0
    maximum: float = 0.0
    """The largest finite magnitude."""

    @classmethod
    def of(cls, tensor: torch.Tensor) -> ExponentHistogram:
        """Count the values of a floating tensor of any shape."""
        values = tensor.detach().reshape(-1)
        if not values.numel():
            return cls()
        low, high = torch.aminmax(values)
        maximum = max(abs(float(low)), abs(float(high)))
        sample = values[:: max(1, values.numel() // MAX_ELEMENTS)].float().abs()
        finite = torch.isfinite(sample)
        kept = sample[finite & (sample > 0)]
        if not math.isfinite(maximum):
            whole = values[torch.isfinite(values)]
            maximum = float(whole.abs().max()) if whole.numel() else 0.0
        counted = torch.bincount(torch.frexp(kept).exponent - 1 - SMALLEST_EXPONENT)
        return cls(
            counts={e + SMALLEST_EXPONENT: count for e, count in enumerate(counted.tolist()) if count},
            num_zeros=int((sample == 0).sum()),
            num_non_finite=int((~finite).sum()),
            maximum=maximum,
        )

    def __add__(self, other: ExponentHistogram) -> ExponentHistogram:
        return ExponentHistogram(
            counts=dict(sorted((Counter(self.counts) + Counter(other.counts)).items())),
            num_zeros=self.num_zeros + other.num_zeros,
            num_non_finite=self.num_non_finite + other.num_non_finite,
            maximum=max(self.maximum, other.maximum),
        )

    @property
    def num_values(self) -> int:
        """Values that are neither zero nor non-finite."""
        return sum(self.counts.values())

    def share_above(self, scale: float = 1.0) -> float:
        """Return the share of the values that overflow FP16 when multiplied by `scale` (a power of two is exact)."""
        shift = math.floor(math.log2(scale))
        above = sum(count for exponent, count in self.counts.items() if exponent + shift >= FIRST_OVERFLOWING)
        return (above + self.num_non_finite) / max(1, self.num_values + self.num_non_finite)

    def share_below(self, scale: float = 1.0) -> float:
        """Return the share of the non-zero values that FP16 flushes to 0 when multiplied by `scale`."""
        shift = math.floor(math.log2(scale))
        below = sum(count for exponent, count in self.counts.items() if exponent + shift <= LAST_FLUSHED)
        return below / max(1, self.num_values)


@dataclass
class UnitRanges:
    """What one unit showed. Errors are sums over all steps that were watched.

    Attributes:
        activations, activation_gradients, parameter_gradients: of its outputs, of the loss with respect to them, and
            of its own parameters.
        forward_error: sum of (gradient x difference of the output in FP16)^2.
        gradient_error: sum of (output x difference of the gradient in FP16, at the loss scale)^2; what overflows there
            does not count.
        output_shape: of its last output.
        overflows: whether its output in FP16 is not finite where FP32's is.
    """

    activations: ExponentHistogram = field(default_factory=ExponentHistogram)
    activation_gradients: ExponentHistogram = field(default_factory=ExponentHistogram)
    parameter_gradients: ExponentHistogram = field(default_factory=ExponentHistogram)
    forward_error: float = 0.0
    gradient_error: float = 0.0
    output_shape: tuple[int, ...] = ()
    overflows: bool = False


@contextmanager
def watch_ranges(
    model: nn.Module, names: Iterable[str], *, scale: float = 65536.0
) -> Iterator[Mapping[str, UnitRanges]]:
    """Watch the modules called `names` inside the block, forward and backward.

    Each runs once more on the same input with inputs and weights rounded to FP16, products in FP32 and the output
    rounded once, as tensor cores do; buffers and the random state stay as they are. Parameters' gradients are read as
    the block ends. Leaves no trace on the model.

    Args:
        scale: the loss scale at which gradients are rounded.
    """
    modules = {name: model.get_submodule(name) for name in names}
    log = {name: UnitRanges() for name in modules}
    with ExitStack() as stack:
        for name, module in modules.items():
            watch = _Watch(log[name], scale)
            stack.callback(module.register_forward_pre_hook(watch.before, with_kwargs=True, prepend=True).remove)
            stack.callback(module.register_forward_hook(watch.after).remove)
        yield log
        for name, module in modules.items():
            for parameter in module.parameters():
                if parameter.grad is not None:
                    log[name].parameter_gradients += ExponentHistogram.of(parameter.grad)


class _Watch:
    """The hooks of one module."""

    def __init__(self, ranges: UnitRanges, scale: float) -> None:
        self._ranges, self._scale = ranges, scale
        self._rounded: torch.Tensor | None = None
        self._inside = False

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._inside:
            return
        self._inside = True
        try:
            self._rounded = _run_rounded(module, args, kwargs)
        finally:
            self._inside = False

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        tensor = first_tensor(output)
        if self._inside or tensor is None or not tensor.is_floating_point():
            return
        own = self._ranges
        value = tensor.detach()
        own.activations += ExponentHistogram.of(value)
        own.output_shape = tuple(value.shape)
        difference = None
        if self._rounded is not None and self._rounded.shape == value.shape:
            difference = self._rounded - value
            if not bool(torch.isfinite(difference).all()):
                own.overflows = own.overflows or bool(torch.isfinite(value).all())
                difference = torch.nan_to_num(difference, nan=0.0, posinf=65504.0, neginf=-65504.0)
        self._rounded = None
        if tensor.requires_grad:
            tensor.register_hook(partial(self._backward, value.clone(), difference))  # type: ignore[no-untyped-call]

    def _backward(self, value: torch.Tensor, difference: torch.Tensor | None, gradient: torch.Tensor) -> None:
        own = self._ranges
        own.activation_gradients += ExponentHistogram.of(gradient)
        if difference is not None:
            own.forward_error += float((gradient * difference).square().sum())
        scaled = gradient * self._scale
        lost = (scaled.half().float() - scaled) / self._scale
        lost = lost.masked_fill(~torch.isfinite(lost), 0.0)  # a grad scaler backs off from what overflows
        own.gradient_error += float((value * lost).square().sum())


def _run_rounded(module: nn.Module, args: Any, kwargs: Any) -> torch.Tensor | None:
    """Run the module on rounded inputs and weights; None where it cannot run a second time."""

    def rounded(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().half().float() if tensor.dtype is torch.float32 else tensor.detach().clone()

    has_statistics = any(buffer.is_floating_point() for buffer in module.buffers())
    state = {name: p.detach() if has_statistics else rounded(p) for name, p in module.named_parameters()}
    state.update({name: buffer.detach().clone() for name, buffer in module.named_buffers()})
    randomness = torch.get_rng_state()
    try:
        with torch.no_grad():
            output = functional_call(module, state, map_tensors(args, rounded), map_tensors(kwargs, rounded))
    except Exception:
        return None
    finally:
        torch.set_rng_state(randomness)
    tensor = first_tensor(output)
    return None if tensor is None or not tensor.is_floating_point() else tensor.half().float()
