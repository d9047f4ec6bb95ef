"""Half-precision operators computed in FP32 and rounded once, as a tensor core with FP32 accumulation does.

A dispatch mode replaces the arithmetic of some operators alone. Tensors stay real half tensors, and autograd and
GradScaler see nothing of it. Reduced-precision reductions inside cuBLAS are not modelled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from autoprec.emulation.operators import Rounding, functional_twins, overload, roundings

__all__ = ["HalfArithmetic", "emulated_dtypes"]

Handler = Callable[..., Any]


@cache
def emulated_dtypes() -> frozenset[torch.dtype]:
    """Return the dtypes that are emulated: FP16 always, BF16 where the CPU has no instructions for its products."""
    probes = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    has_bf16 = any(getattr(torch.cpu, probe, lambda: False)() for probe in probes)
    return frozenset({torch.float16} if has_bf16 else {torch.float16, torch.bfloat16})


def _is_half(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in emulated_dtypes() and value.is_cpu


def _shared_half(values: Iterable[Any]) -> torch.dtype | None:
    """Return the half dtype of all floating tensors of `values`; None where they mix dtypes, which torch refuses."""
    dtypes = {v.dtype for v in values if isinstance(v, torch.Tensor) and v.is_floating_point()}
    strided = all(v.layout is torch.strided and v.is_cpu for v in values if isinstance(v, torch.Tensor))
    return dtypes.pop() if len(dtypes) == 1 and strided and dtypes <= emulated_dtypes() else None


def _up(value: Any) -> Any:
    return value.to(torch.float32) if _is_half(value) else value


def _down(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.dtype is torch.float32 else value


def _call_up(function: Handler, args: Iterable[Any], kwargs: dict[str, Any]) -> Any:
    return function(*map(_up, args), **{name: _up(value) for name, value in kwargs.items()})


def _rounded(function: Handler, args: tuple[Any, ...], kwargs: dict[str, Any], *, rounding: Rounding) -> Any:
    """Call `function` on FP32 copies and round its floating results to the half dtype of its inputs."""
    deciding = [a for i, a in enumerate(args) if i not in rounding.free] if rounding.free else args
    dtype = _shared_half(deciding)
    if dtype is None:
        return function(*args, **kwargs)
    result = _call_up(function, args, kwargs)
    if not isinstance(result, (tuple, list)):
        return _down(result, dtype)
    last = len(result) if rounding.num_rounded is None else rounding.num_rounded
    return type(result)(_down(r, dtype) if i < last else r for i, r in enumerate(result))


def _written(function: Handler, args: tuple[Any, ...], kwargs: dict[str, Any], *, functional: Handler) -> Any:
    """Compute the functional twin of an in-place or out= overload in FP32 and write the rounded result."""
    target = kwargs.get("out", args[0])
    if _shared_half((*args, target)) is None:
        return function(*args, **kwargs)
    result = _call_up(functional, args, {name: value for name, value in kwargs.items() if name != "out"})
    if "out" in kwargs and target.shape != result.shape:
        target.resize_(result.shape)
    return target.copy_(result)


def _to_other_dtype(function: Handler, args: tuple[Any, ...], kwargs: dict[str, Any], *, functional: Handler) -> Any:
    """Give the FP32 result of a product whose result dtype the caller named (CUDA alone has these overloads)."""
    *inputs, dtype = args
    if _shared_half(inputs) is None:
        return function(*args, **kwargs)
    return _call_up(functional, inputs, kwargs).to(dtype)


def _batch_norm(function: Handler, args: tuple[Any, ...], kwargs: dict[str, Any], *, rounding: Rounding) -> Any:
    """Normalise in FP32 and write running statistics that are half back."""
    if _shared_half(args[:3]) is None:
        return function(*args, **kwargs)
    running = tuple(map(_up, args[3:5]))
    result = _rounded(function, (*args[:3], *running, *args[5:]), kwargs, rounding=rounding)
    for own, updated in zip(args[3:5], running, strict=True):
        if own is not updated and args[5]:
            own.copy_(updated)
    return result


def _accumulated(function: Handler, args: tuple[Any, ...], kwargs: dict[str, Any], *, in_place: bool) -> Any:
    """Add up an accumulating index_put in FP32: what the gradient of an indexed tensor is made of."""
    accumulate = args[3] if len(args) > 3 else kwargs.get("accumulate", False)
    dtype = _shared_half((args[0], args[2])) if accumulate else None
    if dtype is None:
        return function(*args, **kwargs)
    total = function(_up(args[0]), args[1], _up(args[2]), *args[3:], **kwargs)
    return args[0].copy_(total) if in_place else total.to(dtype)


@cache
def _handlers() -> dict[Any, Handler]:
    table: dict[Any, Handler] = {operator: partial(_rounded, rounding=r) for operator, r in roundings()}
    table |= {operator: partial(_written, functional=twin) for operator, twin in functional_twins()}
    for name in ("mm", "bmm", "addmm", "baddbmm"):
        operator, functional = overload(f"{name}.dtype"), overload(name)
        if operator is not None and functional is not None:
            table[operator] = partial(_to_other_dtype, functional=functional)
    table[overload("native_batch_norm")] = partial(_batch_norm, rounding=Rounding(free=(3, 4), num_rounded=1))
    for name in ("index_put", "index_put_", "_index_put_impl_"):
        table[overload(name)] = partial(_accumulated, in_place=name.endswith("_"))
    return table


def _any_half(values: Iterable[Any]) -> bool:
    return any(_any_half(v) if isinstance(v, (list, tuple)) else _is_half(v) for v in values)


def _is_composite(func: Any) -> bool:
    """Whether the operator is made of others. Ones that the dispatcher lacks are not: asked of a fake tensor's device
    (`prim`) or a nested tensor's sizes (`sym_size`), it raises, which ends the process from inside a dispatch mode."""
    if not isinstance(func, torch._ops.OpOverload):
        return False
    name: str = func.name()  # type: ignore[no-untyped-call]
    return bool(torch._C._dispatch_has_kernel(name)) and func._can_decompose()


class HalfArithmetic(TorchDispatchMode):
    """Compute the half operators of `operators.py` that this thread calls in FP32, and round their results once."""

    supports_higher_order_operators = True  # they run as torch runs them, their products in true half

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._handlers: dict[Any, Handler | None] = {**_handlers()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            handler = self._handlers[func]
        except KeyError:
            handler = self._handlers[func] = self._decomposed if _is_composite(func) else None
        if handler is not None:
            return handler(func, args, kwargs or {})
        return func(*args, **kwargs) if kwargs else func(*args)

    def _decomposed(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Look inside a composite operator; inference mode alone brings them here whole."""
        values = (*args, *kwargs.values())
        # nested tensors take operators apart themselves, and compute with plain tensors in true half
        if not _any_half(values) or any(isinstance(value, torch.Tensor) and value.is_nested for value in values):
            return func(*args, **kwargs)
        with self:
            return func.decompose(*args, **kwargs)
