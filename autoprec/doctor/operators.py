"""A dispatch mode that looks at the values of every operator: where they stop being finite, what rounds to 0."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from autoprec.doctor.observations import Birth, Flushed, Observations, Products
from autoprec.estimates import Gpu, Roofline
from autoprec.estimates.operations import describe_operation, runs_no_kernel
from autoprec.estimates.roofline import MUCH_PADDING, padding

__all__ = ["HALF", "OperatorWatch"]

HALF = frozenset({torch.float16, torch.bfloat16})
END_OF_FP16 = 65504.0

MAKES_NO_VALUE = frozenset({
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "full", "full_like", "new_full", "fill_",
    "fill", "scalar_tensor", "masked_fill", "masked_fill_", "where", "index_put_", "copy_", "clone", "detach",
    "lift_fresh", "_local_scalar_dense", "zeros", "ones", "arange", "triu", "tril", "clamp_min", "clamp",
})  # fmt: skip
"""Operators whose infinities are a mask that somebody asked for, whose memory is not written yet, or that copy."""
LOSSES = frozenset({
    "nll_loss_forward", "nll_loss2d_forward", "mse_loss", "smooth_l1_loss", "huber_loss",
    "binary_cross_entropy", "binary_cross_entropy_with_logits", "soft_margin_loss", "multi_margin_loss",
    "multilabel_margin_loss_forward", "_ctc_loss",
})  # fmt: skip
"""Loss operators that CUDA's autocast runs in FP32. Cross entropy's own log_softmax stays half there."""
COMPARED = frozenset({
    "mm", "addmm", "bmm", "baddbmm", "convolution_backward", "mul", "div", "_to_copy", "native_batch_norm_backward",
    "native_layer_norm_backward", "_softmax_backward_data", "_log_softmax_backward_data", "gelu_backward",
    "sigmoid_backward", "tanh_backward", "nll_loss_backward", "mse_loss_backward", "sum", "expand",
})  # fmt: skip
"""Operators of a backward pass that are computed again in FP32, to see what half rounds to 0."""


class OperatorWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes what operators do in `seen`. Each waits for its result: never around what is timed.

    Attributes:
        unit: tells the module that runs now.
        paused: nothing is noted (an optimizer or a grad scaler at work).
    """

    def __init__(self, seen: Observations, unit: Callable[[], str], gpu: Gpu) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.paused = 0
        self._seen, self._unit, self._gpu = seen, unit, gpu
        self._roofline = Roofline()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not self.paused and not runs_no_kernel(func):
            self._look(func, args, kwargs, result)
        return result

    def _look(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        name = func.overloadpacket.__name__
        inputs, outputs = _floating((args, kwargs)), _floating(result)
        backward = torch._C._current_graph_task_id() != -1
        unit = self._unit()
        self._note_cost(func, args, kwargs, result, name, unit, inputs, outputs)
        self._note_half(name, unit, backward, inputs, outputs)
        if name not in MAKES_NO_VALUE:
            self._note_birth(name, unit, backward, inputs, outputs)
        if backward and name in COMPARED and any(tensor.dtype in HALF for tensor in outputs):
            self._note_flushed(func, args, kwargs, result, name, unit)

    def _note_birth(
        self, name: str, unit: str, backward: bool, inputs: list[torch.Tensor], outputs: list[torch.Tensor]
    ) -> None:
        for tensor in outputs:
            what = _non_finite(tensor)
            if what is None:
                continue
            known = {_non_finite(each) for each in inputs} - {None}
            is_mask = name == "_to_copy" and what == "-inf" and not inputs[0].requires_grad  # -1e9, cast to half
            if is_mask or (known if what != "NaN" else "NaN" in known):
                continue
            same = any(b.unit == unit and b.backward == backward and b.what == what for b in self._seen.births)
            if not same:
                step = self._seen.num_steps + 1
                cause = "inf" if known else "finite values"
                self._seen.births.append(Birth(step, unit, name, tensor.dtype, what, cause, backward))

    def _note_half(
        self, name: str, unit: str, backward: bool, inputs: list[torch.Tensor], outputs: list[torch.Tensor]
    ) -> None:
        half = [tensor for tensor in outputs if tensor.dtype in HALF]
        if half and name != "_to_copy":
            self._seen.used_half.add(half[0].dtype)
        if backward:
            return
        if name in LOSSES and any(tensor.dtype in HALF for tensor in outputs[:1]):
            self._seen.half_losses.setdefault(unit, name)
        if name == "_softmax" and half:
            self._seen.half_softmax.setdefault(unit, half[0].dtype)
        if name == "_to_copy" and half:
            self._note_rounded(unit, inputs[0], half[0])
        for tensor in half:
            if tensor.dtype is torch.float16 and tensor.numel() and name not in MAKES_NO_VALUE:
                largest = float(torch.where(tensor.abs() < END_OF_FP16, tensor.abs(), 0.0).amax())
                self._seen.largest_half[unit] = max(largest, self._seen.largest_half.get(unit, 0.0))

    def _note_rounded(self, unit: str, given: torch.Tensor, cast: torch.Tensor) -> None:
        """Note a cast that changes whole numbers: positions, times and targets are such, activations are not."""
        if unit in self._seen.rounded or given.dtype not in (torch.float32, torch.float64) or given.requires_grad:
            return
        changed = (cast.to(given.dtype) != given) & torch.isfinite(given)
        if bool(changed.any()) and bool((given == given.round()).all()):
            value, became = given[changed][0], cast[changed][0]
            self._seen.rounded[unit] = (cast.dtype, float(value), float(became))

    def _note_cost(
        self,
        func: Any,
        args: Any,
        kwargs: Any,
        result: Any,
        name: str,
        unit: str,
        inputs: list[Any],
        outputs: list[Any],
    ) -> None:
        try:
            operation = describe_operation(func, args, kwargs, result, unit=unit)
        except Exception:  # an operator whose cost cannot be told costs nothing here
            return
        seconds = self._roofline.seconds(operation, self._gpu)
        self._seen.step_seconds += seconds
        if name == "_to_copy" and inputs and outputs and inputs[0].dtype != outputs[0].dtype:
            self._seen.num_casts += 1
            self._seen.cast_seconds += seconds
        factor = padding(operation.dims, 8)
        if operation.flops and operation.dtype in HALF and factor < MUCH_PADDING:
            products = self._seen.products.setdefault(unit, Products())
            products.flops += operation.flops
            products.padded_flops += operation.flops * factor
            products.sizes = tuple(size for size in operation.dims if size % 8) or products.sizes

    def _note_flushed(self, func: Any, args: Any, kwargs: Any, result: Any, name: str, unit: str) -> None:
        reference = _in_fp32(func, args, kwargs, name)
        flushed = self._seen.flushed.setdefault(unit, Flushed())
        for tensor, exact in zip(_floating(result), _floating(reference), strict=False):
            if tensor.dtype not in HALF or tensor.shape != exact.shape:
                continue
            exact = torch.nan_to_num(exact.abs(), 0.0, 0.0, 0.0)
            lost = exact[(tensor == 0) & (exact > 0)]
            flushed.num_flushed += lost.numel()
            flushed.num_values += int((exact > 0).sum())
            flushed.flushed_magnitude += float(lost.double().sum())
            flushed.magnitude += float(exact.double().sum())

    def note_saved(self, tensor: torch.Tensor, unit: str) -> None:
        """Count a tensor that is kept for the backward pass, where it is an activation."""
        is_half = tensor.dtype in HALF
        if tensor.is_floating_point() and (is_half or tensor.dtype is torch.float32):
            counts = self._seen.saved_bytes.setdefault(unit, Counter())
            counts["half" if is_half else "fp32"] += tensor.numel() * tensor.element_size()


def _floating(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]


def _non_finite(tensor: torch.Tensor) -> str | None:
    if bool(torch.isfinite(tensor).all()):
        return None
    if bool(torch.isnan(tensor).any()):
        return "NaN"
    return "inf" if bool((tensor > 0).logical_and(torch.isinf(tensor)).any()) else "-inf"


def _in_fp32(func: Any, args: Any, kwargs: Any, name: str) -> Any:
    """Run an operator again on FP32 copies of its half inputs; nothing where it cannot take them."""
    if name == "_to_copy":
        return args[0].float()

    def lift(value: Any) -> Any:
        return value.float() if isinstance(value, torch.Tensor) and value.dtype in HALF else value

    try:
        return func(*tree_map(lift, args), **tree_map(lift, kwargs))
    except Exception:
        return ()
