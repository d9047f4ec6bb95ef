"""Casts of a module's weights: which of its tensors a region casts, and the casts of one forward."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, TypeGuard

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter, is_lazy

from autoprec.apply.trees import CASTABLE

__all__ = [
    "CastCache",
    "cast_weight",
    "keeps_running_statistics",
    "owns_tensors",
    "parametrizations",
    "plain_tensors",
    "state_of",
    "wants_cast",
]


class CastCache:
    """Casts of weights made during one forward of the root: each weight is cast once, whoever uses it."""

    __slots__ = ("casts", "num_casts")

    def __init__(self) -> None:
        self.casts: dict[tuple[int, torch.dtype], tuple[torch.Tensor, tuple[int, int], torch.Tensor]] = {}
        self.num_casts = 0

    def cast(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        key = (id(tensor), dtype)
        state = state_of(tensor)
        known = self.casts.get(key)
        if known is not None and known[0] is tensor and known[1] == state:
            return known[2]
        self.num_casts += 1
        cast = cast_weight(tensor, dtype)
        self.casts[key] = (tensor, state, cast)
        return cast


def keeps_running_statistics(module: nn.Module) -> bool:
    """Whether the module keeps FP32 affine parameters and statistics beside half input and output."""
    return isinstance(module, _NormBase) and module.running_mean is not None


def owns_tensors(module: nn.Module) -> bool:
    """Whether the module itself holds a floating tensor that a half forward has to cast."""
    if keeps_running_statistics(module):
        return False
    own = [*module._parameters.values(), *module._buffers.values(), *module.__dict__.values()]
    return "parametrizations" in module._modules or any(isinstance(t, torch.Tensor) and _castable(t) for t in own)


def wants_cast(tensor: torch.Tensor | None, dtype: torch.dtype, skip_sharded: bool = False) -> TypeGuard[torch.Tensor]:
    return (
        tensor is not None
        and tensor.dtype in CASTABLE
        and tensor.dtype != dtype
        and not isinstance(tensor, (UninitializedParameter, UninitializedBuffer))
        and not (skip_sharded and hasattr(tensor, "_local_tensor"))
    )


def plain_tensors(module: nn.Module) -> list[str]:
    parameters, buffers = module._parameters, module._buffers
    return [
        name
        for name, value in module.__dict__.items()
        if isinstance(value, torch.Tensor) and name not in parameters and name not in buffers
    ]


def parametrizations(module: nn.Module, dtype: torch.dtype) -> Iterator[tuple[str, dict[str, Any], Any]]:
    for name, parametrization in module._modules["parametrizations"].named_children():  # type: ignore[union-attr]
        if "forward" not in parametrization.__dict__:
            yield name, parametrization.__dict__, functools.partial(_cast_computed, parametrization, dtype)


def cast_weight(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Cast with history even where gradients are off: another thread, or a part of the forward, may have them on."""
    if torch.is_inference_mode_enabled() or (tensor.requires_grad and not torch.is_grad_enabled()):
        with torch.inference_mode(False), torch.enable_grad():
            return tensor.to(dtype)
    return tensor.to(dtype)


def _cast_computed(parametrization: nn.Module, dtype: torch.dtype) -> torch.Tensor:
    value: torch.Tensor = type(parametrization).forward(parametrization)
    return value.to(dtype) if value.dtype in CASTABLE else value


def _castable(tensor: torch.Tensor) -> bool:
    return is_lazy(tensor) or tensor.dtype in CASTABLE


def state_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Return what changes when a tensor is written to: its version, and its place in memory (`tensor.data = ...`)."""
    try:
        return tensor._version, tensor.data_ptr() if type(tensor) in _WITH_PLACE else 0
    except RuntimeError:  # inference tensors have no version; sparse tensors and those of a transform no place
        return (0 if tensor.is_inference() else tensor._version), 0


_WITH_PLACE = (torch.Tensor, torch.nn.Parameter)
"""Fake tensors and other subclasses have no place in memory, or none that may be asked for."""
