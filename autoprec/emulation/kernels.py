"""One kernel for each policy of CUDA autocast, for operators called with CPU tensors.

A kernel casts what the policy says and calls its operator below autocast: autograd records the casts, and composites do
not meet autocast a second time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from autoprec.emulation.rules import Policy
from autoprec.emulation.weight_cache import cached_cast

__all__ = ["Kernel", "lower_precision", "make_kernel"]

Kernel = Callable[..., Any]
_KEY_SET = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
_below_autocast = torch._C._ExcludeDispatchKeyGuard


def _is_eligible(value: object) -> bool:
    return (
        isinstance(value, torch.Tensor) and value.is_cpu and value.is_floating_point() and value.dtype != torch.float64
    )


def _map_tensors(value: Any, cast: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Cast an eligible tensor or those of a list or tuple; return everything else unchanged."""
    if isinstance(value, torch.Tensor):
        return cast(value) if _is_eligible(value) else value
    if isinstance(value, (list, tuple)):
        items = [_map_tensors(item, cast) for item in value]
        return tuple(items) if isinstance(value, tuple) else items
    return value


def _call(operator: Kernel, args: Any, kwargs: dict[str, Any], cast: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    return operator(*(_map_tensors(a, cast) for a in args), **{k: _map_tensors(v, cast) for k, v in kwargs.items()})


def _to_fp32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dtype is torch.float32 else tensor.to(torch.float32)


def lower_precision(operator: torch._ops.OpOverload, *, use_cache: bool = True) -> Kernel:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        dtype = torch.get_autocast_dtype("cpu")

        def cast(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.dtype is dtype:
                return tensor
            return cached_cast(tensor, dtype) if use_cache else tensor.to(dtype)

        with _below_autocast(_KEY_SET):
            return _call(operator, args, kwargs, cast)

    return kernel


def _fp32(operator: torch._ops.OpOverload) -> Kernel:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        with _below_autocast(_KEY_SET):
            return _call(operator, args, kwargs, _to_fp32)

    return kernel


def _fp32_set_opt_dtype(operator: torch._ops.OpOverload) -> Kernel:
    arguments = operator._schema.arguments
    position = next(i for i, argument in enumerate(arguments) if argument.name == "dtype")

    def kernel(*args: Any, **kwargs: Any) -> Any:
        given = args[position] if len(args) > position else kwargs.get("dtype")
        with _below_autocast(_KEY_SET):
            if given is None and _is_eligible(args[0]):
                return operator(*args[:position], **{**kwargs, "dtype": torch.float32})
            return operator(*args, **kwargs)

    return kernel


def _fp32_append_dtype(operator: torch._ops.OpOverload) -> Kernel:
    overloads = {"Scalar": "ScalarOpt_dtype", "ScalarOpt_dim": "ScalarOpt_dim_dtype"}
    target = getattr(torch.ops.aten.norm, overloads[operator._overloadname])
    defaults = [argument.default_value for argument in operator._schema.arguments]

    def kernel(*args: Any) -> Any:
        dtype = torch.float32 if _is_eligible(args[0]) else args[0].dtype
        with _below_autocast(_KEY_SET):
            return target(*args, *defaults[len(args) :], dtype=dtype)

    return kernel


def _widest(args: tuple[Any, ...], lower: torch.dtype) -> torch.dtype:
    """Return FP32 where any eligible tensor is FP32, else `lower`; another half dtype beside them is refused."""
    dtypes = {t.dtype for a in args for t in (a if isinstance(a, (list, tuple)) else (a,)) if _is_eligible(t)}
    if torch.float32 in dtypes:
        return torch.float32
    if dtypes - {lower}:
        raise RuntimeError(f"autocast to {lower} cannot promote {', '.join(sorted(map(str, dtypes - {lower})))}")
    return lower


def _promote(operator: torch._ops.OpOverload) -> Kernel:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        dtype = _widest(args, torch.get_autocast_dtype("cpu"))
        with _below_autocast(_KEY_SET):
            return _call(operator, args, kwargs, lambda tensor: tensor.to(dtype))

    return kernel


def _banned(operator: torch._ops.OpOverload) -> Kernel:
    name = operator._schema.name.removeprefix("aten::")

    def kernel(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(
            f"{name} is banned inside CUDA autocast: its input, a probability, under- or overflows in half precision. "
            f"Use {name}_with_logits on the values before the sigmoid, or call {name} on FP32 inputs with autocast off."
        )

    return kernel


def _fp32_input_dtype(operator: torch._ops.OpOverload) -> Kernel:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        with _below_autocast(_KEY_SET):
            result = _call(operator, args, kwargs, _to_fp32)
        dtype = args[0].dtype
        return (
            tuple(r.to(dtype) if r.is_floating_point() else r for r in result)
            if isinstance(result, tuple)
            else result.to(dtype)
        )

    return kernel


_MAKERS: dict[Policy, Callable[[torch._ops.OpOverload], Kernel]] = {
    Policy.LOWER_PRECISION: lower_precision,
    Policy.FP32: _fp32,
    Policy.FP32_SET_OPT_DTYPE: _fp32_set_opt_dtype,
    Policy.FP32_APPEND_DTYPE: _fp32_append_dtype,
    Policy.PROMOTE: _promote,
    Policy.BANNED: _banned,
    Policy.FP32_INPUT_DTYPE: _fp32_input_dtype,
}


def make_kernel(operator: torch._ops.OpOverload, policy: Policy) -> Kernel:
    """Return the kernel that applies `policy` to `operator`."""
    return _MAKERS[policy](operator)
