"""Kernels that give `torch.autocast("cpu")` CUDA's operator rules while a context is open.

They are registered for the dispatch key AutocastCPU, which every entry to an operator passes while CPU autocast is on:
functions, methods, C++ composites, scripted code and recomputation. Registrations are process-global; whether autocast is
on stays a matter of each thread.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.library import Library, fallthrough_kernel

from autoprec.emulation.rules import CUDNN_RECURRENT, LIKE_CUDA_ON_CPU, RULES, Policy
from autoprec.emulation.weight_cache import cached_cast, follow_torch_cache
from autoprec.errors import PrecisionWarning

__all__ = ["cuda_autocast_rules", "has_cuda_rule"]

Kernel = Callable[..., Any]
_KEY = "AutocastCPU"
_KEY_SET = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
_below_autocast = torch._C._ExcludeDispatchKeyGuard
_lock = threading.Lock()
_num_open = 0
_installed = ExitStack()


def _is_eligible(value: object) -> bool:
    return (
        isinstance(value, torch.Tensor) and value.is_cpu and value.is_floating_point() and value.dtype != torch.float64
    )


def _map_tensors(value: Any, cast: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Cast an eligible tensor or those of a list; return everything else unchanged."""
    if isinstance(value, torch.Tensor):
        return cast(value) if _is_eligible(value) else value
    if isinstance(value, (list, tuple)):
        return [_map_tensors(item, cast) for item in value]
    return value


def _call(operator: Kernel, args: Any, kwargs: dict[str, Any], cast: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    return operator(*(_map_tensors(a, cast) for a in args), **{k: _map_tensors(v, cast) for k, v in kwargs.items()})


def _to_fp32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dtype is torch.float32 else tensor.to(torch.float32)


def _lower_precision(operator: torch._ops.OpOverload, *, use_cache: bool = True) -> Kernel:
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
    Policy.LOWER_PRECISION: _lower_precision,
    Policy.FP32: _fp32,
    Policy.FP32_SET_OPT_DTYPE: _fp32_set_opt_dtype,
    Policy.FP32_APPEND_DTYPE: _fp32_append_dtype,
    Policy.PROMOTE: _promote,
    Policy.BANNED: _banned,
    Policy.FP32_INPUT_DTYPE: _fp32_input_dtype,
}


def _overload(name: str) -> torch._ops.OpOverload:
    namespace, _, rest = name.partition("::")
    packet, _, overload = rest.partition(".")
    found: torch._ops.OpOverload = getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")
    return found


def _names_with_kernel(key: str) -> set[str]:
    return set(torch._C._dispatch_get_registrations_for_dispatch_key(key))


def has_cuda_rule(name: str) -> bool:
    """Say whether the installed torch has an AutocastCUDA kernel for a qualified operator name."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(name, "AutocastCUDA"))


def _kernels() -> dict[str, Kernel]:
    """Resolve qualified operator name -> kernel for the installed torch."""
    cuda, cpu = _names_with_kernel("AutocastCUDA"), _names_with_kernel(_KEY)
    if unknown := sorted(cuda - RULES.keys()):
        warnings.warn(
            f"CUDA autocast of torch {torch.__version__} has rules that the emulation does not know: {', '.join(unknown)}",
            PrecisionWarning,
            stacklevel=2,
        )
    kernels = dict.fromkeys(sorted(cpu - LIKE_CUDA_ON_CPU), fallthrough_kernel)
    ruled = (name for name in RULES if name in cuda and name not in LIKE_CUDA_ON_CPU & cpu)
    kernels |= {name: _MAKERS[RULES[name]](_overload(name)) for name in ruled}
    return kernels | {name: _lower_precision(_overload(name), use_cache=False) for name in CUDNN_RECURRENT}


def _install() -> ExitStack:
    with ExitStack() as stack:
        libraries: dict[str, Library] = {}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*[Oo]verrid")
            for name, kernel in _kernels().items():
                namespace, _, rest = name.partition("::")
                if namespace not in libraries:
                    libraries[namespace] = Library(namespace, "IMPL", _KEY)
                    stack.callback(libraries[namespace]._destroy)
                libraries[namespace].impl(rest, kernel)
        stack.enter_context(follow_torch_cache())
        stack.callback(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled())
        torch.backends.mha.set_fastpath_enabled(False)
        return stack.pop_all()


@contextmanager
def cuda_autocast_rules() -> Iterator[None]:
    """Let CPU autocast follow CUDA's operator lists, in every thread, until the last open context ends.

    The fused inference path of nn.MultiheadAttention and nn.TransformerEncoderLayer is off meanwhile, as it is under CUDA
    autocast. Nothing changes where autocast is off.
    """
    global _num_open, _installed
    with _lock:
        if _num_open == 0:
            _installed = _install()
        _num_open += 1
    try:
        yield
    finally:
        with _lock:
            _num_open -= 1
            if _num_open == 0:
                _installed.close()
