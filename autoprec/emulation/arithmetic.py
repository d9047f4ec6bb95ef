"""Half-precision operators computed in FP32 and rounded once, as a tensor core with FP32 accumulation does.

A dispatch mode replaces the arithmetic of the heavy operators alone. Tensors stay real half tensors, and autograd and
GradScaler see nothing of it. Reduced-precision reductions inside cuBLAS are not modelled.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["HalfArithmetic", "emulated_dtypes"]

aten = torch.ops.aten
Handler = Callable[..., Any]


@cache
def emulated_dtypes() -> frozenset[torch.dtype]:
    """Return the dtypes that are emulated: FP16 always, BF16 where the CPU has no instructions for it."""
    probes = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    if any(getattr(torch.cpu, probe, lambda: False)() for probe in probes):
        return frozenset({torch.float16})
    return frozenset({torch.float16, torch.bfloat16})


def _half_dtype(values: Any) -> torch.dtype | None:
    """Return the half dtype that all floating tensors of `values` share; None where they share none."""
    found: torch.dtype | None = None
    for value in values:
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            if value.dtype is not found and found is not None:
                return None
            found = value.dtype
    return found if found in emulated_dtypes() else None


def _up(value: Any) -> Any:
    is_half = isinstance(value, torch.Tensor) and value.dtype in emulated_dtypes()
    return value.to(torch.float32) if is_half else value


def _down(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.dtype is torch.float32 else value
    if isinstance(value, (list, tuple)):
        return type(value)(_down(item, dtype) for item in value)
    return value


def _rounded(function: Handler, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call `function` on FP32 copies and round its floating results to the half dtype of its inputs."""
    dtype = _half_dtype(args)
    if dtype is None:
        return function(*args, **kwargs)
    return _down(function(*map(_up, args), **{k: _up(v) for k, v in kwargs.items()}), dtype)


def _attention(function: Handler, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Round the output alone; the log-sum-exp stays FP32, as in torch's own kernel."""
    dtype = _half_dtype(args[:3])
    if dtype is None:
        return function(*args, **kwargs)
    output, logsumexp = function(*map(_up, args), **{k: _up(v) for k, v in kwargs.items()})
    return output.to(dtype), logsumexp


def _attention_backward(function: Handler, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    dtype = _half_dtype(args[:5])
    if dtype is None:
        return function(*args, **kwargs)
    return _down(function(*map(_up, args), **{k: _up(v) for k, v in kwargs.items()}), dtype)


def _handlers() -> dict[Any, Handler]:
    names = (
        "mm addmm bmm baddbmm addbmm mv addmv dot vdot addr convolution convolution_backward conv_tbc conv_tbc_backward"
    )
    table: dict[Any, Handler] = {getattr(aten, name).default: _rounded for name in names.split()}
    table[aten._scaled_dot_product_flash_attention_for_cpu.default] = _attention
    table[aten._scaled_dot_product_flash_attention_for_cpu_backward.default] = _attention_backward
    return table


class HalfArithmetic(TorchDispatchMode):
    """Compute the heavy half operators of this thread in FP32 and round their results once."""

    def __init__(self) -> None:
        super().__init__()
        self._handlers = _handlers()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        handler = self._handlers.get(func)
        if handler is None:
            return func(*args, **kwargs) if kwargs else func(*args)
        return handler(func, args, kwargs or {})
