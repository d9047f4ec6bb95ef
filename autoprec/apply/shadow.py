"""Half copies of a module's weights for the time of one forward, while the FP32 masters stay where they are.

A copy is put into the module's `__dict__`, which Python looks at before `nn.Module` looks into `_parameters`. Autograd
carries the gradient of the copy to the master. Modules with running statistics keep their affine parameters and
statistics; a buffer that the forward writes to is kept in FP32 from then on.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter, is_lazy

from autoprec.apply.trees import CASTABLE

__all__ = ["CastCache", "Shadow", "keeps_running_statistics", "owns_tensors"]

_MISSING = object()


class CastCache:
    """Casts of weights made during one forward of the root: each weight is cast once, whoever uses it."""

    __slots__ = ("casts", "num_casts")

    def __init__(self) -> None:
        self.casts: dict[tuple[int, torch.dtype, bool], tuple[torch.Tensor, int, torch.Tensor]] = {}
        self.num_casts = 0

    def cast(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        key = (id(tensor), dtype, torch.is_grad_enabled())
        version = _version(tensor)
        known = self.casts.get(key)
        if known is not None and known[0] is tensor and known[1] == version:
            return known[2]
        self.num_casts += 1
        cast = tensor.to(dtype)
        self.casts[key] = (tensor, version, cast)
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


class Shadow:
    """The substitutions of one forward; `enter` module by module, `leave` once."""

    __slots__ = ("buffers", "cache", "dtype", "entries")

    def __init__(self, dtype: torch.dtype, cache: CastCache | None) -> None:
        self.dtype = dtype
        self.cache = cache
        self.entries: list[tuple[dict[str, Any], str, Any, Any]] = []
        self.buffers: list[tuple[nn.Module, str, torch.Tensor, torch.Tensor, int, set[str]]] = []

    def enter(self, module: nn.Module, written: set[str], *, skip_sharded: bool = False) -> None:
        """Substitute the module's own floating tensors.

        Args:
            written: names of buffers that the forward writes to; kept in FP32, and added to when one is found.
            skip_sharded: leave distributed tensors for the module's own forward, when they are gathered.
        """
        if keeps_running_statistics(module):
            return
        own = module.__dict__
        for name, parameter in module._parameters.items():
            if parameter is not None and name not in own and self._wants(parameter, skip_sharded):
                self._substitute(own, name, self._cast(parameter))
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in own and name not in written and self._wants(buffer, skip_sharded):
                cast = buffer.to(self.dtype)
                self._substitute(own, name, cast)
                self.buffers.append((module, name, buffer, cast, _version(cast), written))
        for name in [name for name, value in own.items() if isinstance(value, torch.Tensor)]:
            if name not in module._parameters and name not in module._buffers and self._wants(own[name], skip_sharded):
                self._substitute(own, name, self._cast(own[name]))
        flat_weights = own.get("_flat_weights")
        if isinstance(flat_weights, list) and isinstance(module, nn.RNNBase):
            self._substitute(own, "_flat_weights", [self._cast(w) if self._wants(w) else w for w in flat_weights])
        if "parametrizations" in module._modules:
            for parametrization in module._modules["parametrizations"].children():  # type: ignore[union-attr]
                if "forward" not in parametrization.__dict__:
                    call = functools.partial(_cast_computed, parametrization, self.dtype)
                    self._substitute(parametrization.__dict__, "forward", call)

    def leave(self) -> None:
        """Give everything back; carry over to the masters what the forward wrote into buffers."""
        for namespace, name, original, substitute in reversed(self.entries):
            if namespace.get(name, _MISSING) is not substitute:
                continue
            if original is _MISSING:
                del namespace[name]
            else:
                namespace[name] = original
        for module, name, buffer, cast, version, written in self.buffers:
            current = module._buffers.get(name)
            if current is buffer and _version(cast) != version:
                with torch.no_grad():
                    buffer.copy_(cast)
                written.add(name)
            elif current is not None and current is not buffer:
                module._buffers[name] = current.to(buffer.dtype)
                written.add(name)

    def _wants(self, tensor: Any, skip_sharded: bool = False) -> bool:
        return (
            tensor is not None
            and tensor.dtype in CASTABLE
            and tensor.dtype != self.dtype
            and not isinstance(tensor, (UninitializedParameter, UninitializedBuffer))
            and not (skip_sharded and hasattr(tensor, "_local_tensor"))
        )

    def _cast(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.dtype) if self.cache is None else self.cache.cast(tensor, self.dtype)

    def _substitute(self, namespace: dict[str, Any], name: str, substitute: Any) -> None:
        self.entries.append((namespace, name, namespace.get(name, _MISSING), substitute))
        namespace[name] = substitute


def _cast_computed(parametrization: nn.Module, dtype: torch.dtype) -> torch.Tensor:
    value: torch.Tensor = type(parametrization).forward(parametrization)
    return value.to(dtype) if value.dtype in CASTABLE else value


def _castable(tensor: torch.Tensor) -> bool:
    return is_lazy(tensor) or tensor.dtype in CASTABLE


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() or torch.compiler.is_compiling() else tensor._version
