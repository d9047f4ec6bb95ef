"""One recorded operator: what it computes and moves, independent of any GPU."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.utils.flop_counter import flop_registry

__all__ = ["Kind", "Operation", "describe_operation", "runs_no_kernel", "flat_tensors"]

aten = torch.ops.aten

Kind = Literal[
    "product",
    "attention",
    "convolution",
    "grouped convolution",
    "depthwise convolution",
    "norm",
    "elementwise",
    "optimizer",
]
"""What decides how much of a GPU an operator reaches; "elementwise" is all that is none of the others."""

_NO_KERNEL = {
    aten.empty,
    aten.empty_like,
    aten.empty_strided,
    aten.new_empty,
    aten.new_empty_strided,
    aten._unsafe_view,
    aten.lift_fresh,
    aten.set_,
    aten.resize_,
    aten._local_scalar_dense,
}

_CONVOLUTIONS = {aten.convolution, aten.convolution_backward}

_TRAFFIC = {
    aten.native_batch_norm: 3 / 2,
    aten.native_batch_norm_backward: 5 / 3,
    aten.native_group_norm: 3 / 2,
    aten.native_group_norm_backward: 5 / 3,
    aten.native_layer_norm_backward: 5 / 3,
}
"""Passes over memory of PyTorch's CUDA norm kernels (Normalization.cuh, layer_norm_kernel.cu): statistics, then values
forward; reductions, then the gradient of the input backward. Relative to reading and writing each tensor once."""

_LAUNCHES = {aten.convolution_backward: 2, aten.native_batch_norm: 2, aten.native_batch_norm_backward: 2}
_LIST_TENSORS, _LIST_ELEMENTS = 110, 320 * 65536
"""Tensors and elements that one kernel over a list takes (aten/src/ATen/native/cuda/MultiTensorApply.cuh)."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One operator as it ran.

    Attributes:
        name: the operator, such as "aten.convolution".
        unit: the module that it belongs to ("" is the root).
        phase: "forward", "backward" or "optimizer".
        dtype: of the products' operands, else of the first floating tensor.
        flops: multiplications and additions of products and convolutions; 0 elsewhere.
        num_bytes: bytes read and written.
        layout_bytes: bytes that tensor-core convolutions move besides to turn NCHW into NHWC and back.
        dims: sizes that tensor cores pad (rows, columns, depth); empty where there are no products.
        num_launches: kernels started.
        kind: what decides the share of the GPU that it reaches.
        channels_last: a convolution whose tensors lie in channels_last.
        groups: of a convolution.
        repeats: how often it runs in one step (more than 1 under accumulation).
    """

    name: str
    unit: str
    phase: str
    dtype: torch.dtype | None
    flops: int
    num_bytes: float
    layout_bytes: int = 0
    dims: tuple[int, ...] = ()
    num_launches: int = 1
    repeats: int = 1
    kind: Kind = "elementwise"
    channels_last: bool = False
    groups: int = 1


def runs_no_kernel(operator: Any) -> bool:
    """Return whether the operator only makes views or reserves memory."""
    return bool(operator.is_view) or operator.overloadpacket in _NO_KERNEL


def flat_tensors(values: Sequence[Any]) -> Iterator[torch.Tensor]:
    """Yield the strided tensors among an operator's arguments or results, lists of tensors included.

    Sparse and opaque tensors have no storage of their own; their parts are strided tensors that other operators make.
    """
    for value in values:
        if isinstance(value, torch.Tensor):
            if value.layout is torch.strided:
                yield value
        elif isinstance(value, (list, tuple)):
            yield from flat_tensors(value)


def describe_operation(
    operator: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    result: Any,
    *,
    unit: str = "",
    phase: str = "forward",
    repeats: int = 1,
    masks: Sequence[torch.Tensor] = (),
) -> Operation:
    """Describe one call of an operator from the shapes, strides and dtypes of its tensors.

    `masks` are those inputs of which only one byte an element is moved.
    """
    packet = operator.overloadpacket
    inputs = [*flat_tensors(args), *flat_tensors(list(kwargs.values()))]
    outputs = list(flat_tensors([result]))
    flops, dims = _count_flops(packet, args, kwargs, result)
    written = outputs or list(flat_tensors(args[:1]))
    moved = sum(_num_bytes(tensor) for tensor in (*inputs, *written))
    channels_last = packet in _CONVOLUTIONS and any(_is_channels_last(t) for t in _images(packet, args, result))
    return Operation(
        name=str(packet),
        unit=unit,
        phase=phase,
        dtype=_dtype_of(inputs, outputs),
        flops=flops,
        num_bytes=(moved - sum(mask.numel() * (mask.element_size() - 1) for mask in masks)) * _TRAFFIC.get(packet, 1.0),
        layout_bytes=0 if channels_last else _layout_bytes(packet, args, result),
        dims=dims,
        num_launches=_num_launches(packet, args),
        repeats=repeats,
        kind="optimizer" if phase == "optimizer" else _kind(packet, args),
        channels_last=channels_last,
        groups=_groups(packet, args),
    )


def _num_launches(packet: Any, args: Sequence[Any]) -> int:
    if args and isinstance(args[0], (list, tuple)) and args[0] and isinstance(args[0][0], torch.Tensor):
        elements = sum(int(tensor.numel()) for tensor in args[0])
        return max(1, math.ceil(len(args[0]) / _LIST_TENSORS), math.ceil(elements / _LIST_ELEMENTS))
    return _LAUNCHES.get(packet, 1)


def _num_bytes(tensor: torch.Tensor) -> int:
    size = tensor.numel() * tensor.element_size()
    return min(size, tensor.untyped_storage().nbytes()) if 0 in tensor.stride() else size


def _dtype_of(inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> torch.dtype | None:
    return next((t.dtype for t in (*inputs, *outputs) if t.is_floating_point() or t.is_complex()), None)


def _count_flops(
    packet: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
) -> tuple[int, tuple[int, ...]]:
    if packet in _OWN_FORMULAS:
        return _OWN_FORMULAS[packet](args, result)
    if packet not in flop_registry:
        return 0, ()
    flops = int(flop_registry[packet](*args, **kwargs, out_val=result))
    return flops, _matrix_dims(args)


def _matrix_dims(args: Sequence[Any]) -> tuple[int, ...]:
    tensors = [tensor for tensor in args if isinstance(tensor, torch.Tensor)]
    left, right = tensors[-2], tensors[-1]
    return (int(left.shape[-2]), int(left.shape[-1]), int(right.shape[-1]))


def _kind(packet: Any, args: Sequence[Any]) -> Kind:
    if packet in _CONVOLUTIONS:
        weight = args[1] if packet is aten.convolution else args[2]
        if _groups(packet, args) == 1:
            return "convolution"
        return "depthwise convolution" if weight.shape[1] == 1 else "grouped convolution"
    name = str(packet)
    if "attention" in name:
        return "attention"
    if "norm" in name and "linalg" not in name:
        return "norm"
    return "product" if packet in flop_registry or packet in _OWN_FORMULAS else "elementwise"


def _groups(packet: Any, args: Sequence[Any]) -> int:
    if packet not in _CONVOLUTIONS:
        return 1
    return int(args[8] if packet is aten.convolution else args[9])


def _images(packet: Any, args: Sequence[Any], result: Any) -> list[torch.Tensor]:
    """Return what a convolution reads and writes beside its weights: input and output, or their gradients."""
    if packet is aten.convolution:
        return [args[0], result]
    return [args[0], args[1], *(tensor for tensor in result[:1] if tensor is not None)]


def _is_channels_last(tensor: torch.Tensor) -> bool:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return tensor.dim() in formats and tensor.is_contiguous(memory_format=formats[tensor.dim()])


def _layout_bytes(packet: Any, args: Sequence[Any], result: Any) -> int:
    """cuDNN's tensor-core kernels work on channels_last, in one and three dimensions too."""
    if packet not in _CONVOLUTIONS:
        return 0
    return sum(2 * tensor.numel() * tensor.element_size() for tensor in _images(packet, args, result))


def _convolution(args: Sequence[Any], result: Any) -> tuple[int, tuple[int, ...]]:
    source, weight, transposed, groups = args[0], args[1], args[6], args[8]
    return _convolution_products(source if transposed else result, weight, groups)


def _convolution_backward(args: Sequence[Any], result: Any) -> tuple[int, tuple[int, ...]]:
    """Each gradient that is asked for (input, weight) costs as many products as the forward; groups are respected."""
    gradient, source, weight, transposed, groups, mask = args[0], args[1], args[2], args[7], args[9], args[10]
    flops, dims = _convolution_products(source if transposed else gradient, weight, groups)
    return flops * sum(mask[:2]), dims


def _convolution_products(positions: torch.Tensor, weight: torch.Tensor, groups: int) -> tuple[int, tuple[int, ...]]:
    flops = 2 * positions.numel() * math.prod(weight.shape[1:])
    return flops, (int(weight.shape[0]) // groups, int(weight.shape[1]))


def _attention_forward(args: Sequence[Any], result: Any) -> tuple[int, tuple[int, ...]]:
    query, key, value = args[:3]
    pairs = math.prod(query.shape[:-1]) * key.shape[-2]
    return int(2 * pairs * (query.shape[-1] + value.shape[-1])), (int(query.shape[-1]),)


def _attention_backward(args: Sequence[Any], result: Any) -> tuple[int, tuple[int, ...]]:
    """Scores again, then the gradients of values, probabilities, queries and keys: 2.5 times the forward products."""
    query, key, value = args[1:4]
    pairs = math.prod(query.shape[:-1]) * key.shape[-2]
    return int(2 * pairs * (3 * query.shape[-1] + 2 * value.shape[-1])), (int(query.shape[-1]),)


def _recurrent(args: Sequence[Any], result: Any) -> tuple[int, tuple[int, ...]]:
    """One recurrent layer and direction: every step multiplies input and state by their weights."""
    steps, weights = args[0], args[1:3]
    return int(2 * steps.shape[0] * steps.shape[1] * sum(weight.numel() for weight in weights)), ()


def _recurrent_backward(args: Sequence[Any], result: Any) -> tuple[int, tuple[int, ...]]:
    flops, dims = _recurrent(args, result)
    return 2 * flops, dims


_OWN_FORMULAS = {
    aten.convolution: _convolution,
    aten.convolution_backward: _convolution_backward,
    aten._scaled_dot_product_flash_attention_for_cpu: _attention_forward,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    aten.mkldnn_rnn_layer: _recurrent,
    aten.mkldnn_rnn_layer_backward: _recurrent_backward,
}
"""What torch's own table lacks, or counts as if there were no groups (the weight gradient of a convolution)."""
