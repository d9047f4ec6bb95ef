"""Tensors that a module only reads and that half cannot hold: masks, tables of positions, statistics."""

from __future__ import annotations

import dis
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from autoprec.apply.casts import plain_tensors
from autoprec.apply.checkpointing import own_forward

__all__ = ["Unholdable", "find_unholdable", "multiplies"]

STATISTICS = frozenset({"running_mean", "running_var", "running_std", "mean", "std", "var", "variance"})
"""Names of what normalisations keep of their data, torchvision's FrozenBatchNorm2d and column scalers among them."""

_OF_ONE_DTYPE = frozenset(
    {
        "addbmm", "addmm", "addmv", "addr", "baddbmm", "bilinear", "bmm", "cdist", "chain_matmul", "conv1d", "conv2d",
        "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "dot", "einsum", "group_norm", "gru_cell",
        "inner", "layer_norm", "linear", "lstm_cell", "matmul", "mm", "multi_head_attention_forward", "mv", "outer",
        "rms_norm", "scaled_dot_product_attention", "tensordot", "vdot",
    }
)  # fmt: skip
"""Functions and methods that refuse tensors of two dtypes."""
MAX_DEPTH = 3

_KNOWN: WeakKeyDictionary[type, bool] = WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class Unholdable:
    """A tensor of a module, and what becomes of it in half; `is_lost`: its values are worth a warning."""

    name: str
    reason: str
    is_lost: bool = True


def find_unholdable(module: nn.Module, dtype: torch.dtype) -> Iterator[Unholdable]:
    """Yield the module's own FP32 buffers, frozen parameters and plain attributes that `dtype` cannot hold.

    Those are: finite values that overflow, whole numbers that become others, and statistics of a normalisation.
    Tensors without values (lazy, fake, on the meta device) are left out.
    """
    frozen = {name: p for name, p in module._parameters.items() if p is not None and not p.requires_grad}
    plain = {name: module.__dict__[name] for name in plain_tensors(module) if not module.__dict__[name].requires_grad}
    for name, tensor in {**frozen, **module._buffers, **plain}.items():
        if tensor is None or is_lazy(tensor) or tensor.dtype is not torch.float32 or not _has_values(tensor):
            continue
        values = tensor.detach()
        cast = values.to(dtype).float()
        overflows = values.isfinite() & ~cast.isfinite()
        if overflows.any():
            value = float(values[overflows][0])
            yield Unholdable(name, f"{value:g} becomes {'inf' if value > 0 else '-inf'}")
        elif (cast != values).any() and bool((values == values.round()).all()):
            changed = cast != values
            yield Unholdable(name, f"{float(values[changed][0]):.10g} becomes {float(cast[changed][0]):.10g}")
        elif name in STATISTICS and name in module._buffers:
            yield Unholdable(name, "statistics", is_lost=False)


def multiplies(module: nn.Module) -> bool:
    """Whether the code of the module itself, apart from its parts, computes products, which take one dtype alone.

    Methods of the class that the forward names and functions that they name are read along; nothing is run.
    """
    forward = own_forward(module)
    function = getattr(forward, "func", getattr(forward, "__func__", forward))
    if isinstance(function, types.FunctionType) and _has_product([function], type(module)):
        return True
    cls = type(module)
    if cls not in _KNOWN:
        _KNOWN[cls] = _has_product(_functions(cls, "forward"), cls)
    return _KNOWN[cls]


def _has_product(functions: Iterable[types.FunctionType], cls: type[nn.Module]) -> bool:
    left = [(function, 0) for function in functions]
    seen: set[types.CodeType] = set()
    while left:
        function, depth = left.pop()
        if function.__code__ in seen or depth > MAX_DEPTH:
            continue
        seen.add(function.__code__)
        for code in _codes(function.__code__):
            if _OF_ONE_DTYPE & set(code.co_names) or any(i.argrepr in ("@", "@=") for i in dis.get_instructions(code)):
                return True
            for name in code.co_names:
                called = function.__globals__.get(name)
                if isinstance(called, types.FunctionType) and not called.__module__.startswith("torch."):
                    left.append((called, depth + 1))
                left += [(each, depth + 1) for each in _functions(cls, name)]
    return False


def _functions(cls: type[nn.Module], name: str) -> list[types.FunctionType]:
    """Return what a method of this name may be, in the class and those it comes from; nn.Module computes nothing."""
    members = (vars(base).get(name) for base in cls.__mro__ if base not in (nn.Module, object))
    found = (getattr(member, "__func__", member) for member in members)
    return [each for each in found if isinstance(each, types.FunctionType)]


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _has_values(tensor: torch.Tensor) -> bool:
    is_plain = type(tensor) in (torch.Tensor, nn.Parameter)
    return is_plain and tensor.device.type != "meta" and tensor.layout is torch.strided and tensor.numel() > 0
