"""Record the ranges of what flows through a model's units, forward and backward, and what computing in half does to it.

with watch_ranges(model, names) as log:
    loss(model, batch).backward()
log["layer1"].activations.share_above()
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import nn
from torch.func import functional_call

from autoprec.apply import apply_policy, remove_policy
from autoprec.apply.trees import first_tensor
from autoprec.emulation import emulate
from autoprec.errors import PrecisionWarning
from autoprec.formats import FP16
from autoprec.policy import LowPrecision, Policy
from autoprec.units.trial_runs import map_tensors

__all__ = ["HALF_DTYPES", "ExponentHistogram", "HalfRun", "UnitRanges", "watch_ranges"]

HALF_DTYPES: Mapping[LowPrecision, torch.dtype] = {"fp16": torch.float16, "bf16": torch.bfloat16}
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
        """Count the values of a floating tensor of any shape, those that are stored of a sparse or jagged one."""
        stored = tensor.detach()
        if stored.layout is torch.sparse_coo:
            stored = stored.coalesce()
        values = (stored if stored.layout is torch.strided else stored.values()).reshape(-1)
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
class HalfRun:
    """What computing in one half did to a unit. All are sums over the steps that were watched.

    Attributes:
        forward_error: sum of (gradient x difference of the output)^2.
        gradient_error: sum of (output x difference of the gradient)^2, in FP16 at the loss scale; what overflows there
            does not count.
        lost, size: sums of squares of the output's difference, and of the output in FP32.
        overflows: whether the output is not finite where FP32's is.
    """

    forward_error: float = 0.0
    gradient_error: float = 0.0
    lost: float = 0.0
    size: float = 0.0
    overflows: bool = False

    def __add__(self, other: HalfRun) -> HalfRun:
        return HalfRun(
            self.forward_error + other.forward_error,
            self.gradient_error + other.gradient_error,
            self.lost + other.lost,
            self.size + other.size,
            self.overflows or other.overflows,
        )

    @property
    def output_error(self) -> float:
        """The output's difference as a share of its size."""
        return math.sqrt(self.lost / self.size) if self.size > 0 else 0.0


def _half_runs() -> dict[LowPrecision, HalfRun]:
    return {dtype: HalfRun() for dtype in HALF_DTYPES}


@dataclass
class UnitRanges:
    """What one unit showed.

    Attributes:
        activations, activation_gradients, parameter_gradients: of its outputs, of the loss with respect to them, and
            of its own parameters.
        half: dtype -> what computing in it did.
        output_shape: of its last output.
    """

    activations: ExponentHistogram = field(default_factory=ExponentHistogram)
    activation_gradients: ExponentHistogram = field(default_factory=ExponentHistogram)
    parameter_gradients: ExponentHistogram = field(default_factory=ExponentHistogram)
    half: dict[LowPrecision, HalfRun] = field(default_factory=_half_runs)
    output_shape: tuple[int, ...] = ()


@contextmanager
def watch_ranges(
    model: nn.Module, names: Iterable[str], *, scale: float = 65536.0
) -> Iterator[Mapping[str, UnitRanges]]:
    """Watch the modules called `names` inside the block, forward and backward.

    Each runs once more in FP16 and in BF16 on the same input, as a trial does under a policy that has it in that
    precision; on a CPU that is emulated. Buffers and the random state stay as they are. Parameters' gradients are read
    as the block ends. Leaves no trace on the model, which must carry no policy.

    Args:
        scale: the loss scale at which gradients are rounded to FP16.
    """
    modules = {name: model.get_submodule(name) for name in names}
    log = {name: UnitRanges() for name in modules}
    on_cpu = all(parameter.is_cpu for parameter in model.parameters())
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore", PrecisionWarning)  # a run in half of one unit is not the user's run
        stack.enter_context(emulate() if on_cpu else nullcontext())
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
        self._in_half: dict[LowPrecision, torch.Tensor | None] = {}
        self._inside = False

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._inside:
            return
        self._inside = True
        try:
            self._in_half = {dtype: _run_in_half(module, args, kwargs, dtype) for dtype in HALF_DTYPES}
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
        differences = {
            dtype: self._difference(own.half[dtype], value, found)
            for dtype, found in self._in_half.items()
            if found is not None and found.shape == value.shape
        }
        self._in_half = {}
        if tensor.requires_grad:
            tensor.register_hook(partial(self._backward, value.clone(), differences))  # type: ignore[no-untyped-call]

    def _difference(self, run: HalfRun, value: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
        difference = found - value
        if not bool(torch.isfinite(difference).all()):
            run.overflows = run.overflows or bool(torch.isfinite(value).all())
            difference = torch.nan_to_num(difference, nan=0.0, posinf=FP16.largest, neginf=-FP16.largest)
        else:
            run.lost += float(difference.square().sum())
            run.size += float(value.square().sum())
        return difference

    def _backward(
        self, value: torch.Tensor, differences: Mapping[LowPrecision, torch.Tensor], gradient: torch.Tensor
    ) -> None:
        own = self._ranges
        own.activation_gradients += ExponentHistogram.of(gradient)
        for dtype, run in own.half.items():
            if dtype in differences:
                run.forward_error += float((gradient * differences[dtype]).square().sum())
            scale = self._scale if dtype == "fp16" else 1.0
            scaled = gradient * scale
            lost = (scaled.to(HALF_DTYPES[dtype]).float() - scaled) / scale
            lost = lost.masked_fill(~torch.isfinite(lost), 0.0)  # a grad scaler backs off from what overflows
            run.gradient_error += float((value * lost).square().sum())


def _run_in_half(module: nn.Module, args: Any, kwargs: Any, dtype: LowPrecision) -> torch.Tensor | None:
    """Run the module in half as a trial does; return its output in FP32, None where it cannot run so."""

    def fresh(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().clone()  # a module may write to its input

    state = torch.get_rng_state()
    try:
        buffers = {name: buffer.detach().clone() for name, buffer in module.named_buffers()}
        apply_policy(module, Policy(default=dtype, dtype=dtype))
        try:
            with torch.no_grad():
                output = functional_call(module, buffers, map_tensors(args, fresh), map_tensors(kwargs, fresh))
        finally:
            remove_policy(module)
    except Exception:
        return None
    finally:
        torch.set_rng_state(state)
    tensor = first_tensor(output)
    return None if tensor is None or not tensor.is_floating_point() else tensor.float()
