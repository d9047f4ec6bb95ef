"""A context in which `torch.autocast("cpu")` follows CUDA's operator rules.

Kernels are registered for the dispatch key AutocastCPU, which every entry to an operator passes while CPU autocast is
on: functions, methods, C++ composites, scripted code and recomputation. Registrations are process-global; whether
autocast is on stays a matter of each thread.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch.library import Library, fallthrough_kernel

from autoprec.emulation.kernels import Kernel, lower_precision, make_kernel
from autoprec.emulation.rules import CUDNN_RECURRENT, LIKE_CUDA_ON_CPU, NEVER_ON_CPU, RULES
from autoprec.emulation.weight_cache import follow_torch_cache
from autoprec.errors import PrecisionWarning

__all__ = ["cuda_autocast_rules", "unknown_rules"]

_KEY = "AutocastCPU"
_lock = threading.Lock()
_num_open = 0
_installed = ExitStack()


def _overload(name: str) -> torch._ops.OpOverload:
    namespace, _, rest = name.partition("::")
    packet, _, overload = rest.partition(".")
    found: torch._ops.OpOverload = getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")
    return found


def _names_with_kernel(key: str) -> set[str]:
    """Return torch's and torchvision's own operators with a kernel for `key`; other packages' are left alone."""
    names = torch._C._dispatch_get_registrations_for_dispatch_key(key)
    return {name for name in names if name.startswith(("aten::", "torchvision::"))}


def unknown_rules() -> list[str]:
    """Return the operators with an AutocastCUDA kernel in the installed torch that `RULES` does not name."""
    return sorted(_names_with_kernel("AutocastCUDA") - RULES.keys())


def _kernels() -> dict[str, Kernel]:
    """Resolve qualified operator name -> kernel for the installed torch."""
    cuda, cpu = _names_with_kernel("AutocastCUDA"), _names_with_kernel(_KEY)
    kernels = dict.fromkeys(sorted(cpu - LIKE_CUDA_ON_CPU), fallthrough_kernel)
    for name, policy in RULES.items():
        if name in cuda - NEVER_ON_CPU - (LIKE_CUDA_ON_CPU & cpu):
            kernels[name] = make_kernel(_overload(name), policy)
    return kernels | {name: lower_precision(_overload(name), use_cache=False) for name in CUDNN_RECURRENT}


def _warn_of_unknown_rules() -> None:
    if unknown := unknown_rules():
        warnings.warn(
            f"the emulation does not know these rules of CUDA autocast in torch {torch.__version__}; their "
            f"operators keep the dtype of their inputs: {', '.join(unknown)}",
            PrecisionWarning,
            stacklevel=4,
        )


def _register(kernels: dict[str, Kernel]) -> ExitStack:
    """Register kernels for the dispatch key; closing the returned stack gives torch its own back."""
    libraries: dict[str, Library] = {}
    with ExitStack() as stack, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*[Oo]verrid")
        for name, kernel in kernels.items():
            namespace, _, rest = name.partition("::")
            if namespace not in libraries:
                libraries[namespace] = Library(namespace, "IMPL", _KEY)  # type: ignore[no-untyped-call]
                stack.callback(libraries[namespace]._destroy)
            libraries[namespace].impl(rest, kernel)  # type: ignore[no-untyped-call]
        return stack.pop_all()


@contextmanager
def _fused_attention_off() -> Iterator[None]:
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


@contextmanager
def _no_graph_across() -> Iterator[None]:
    """Keep graphs compiled under one set of rules from being used under the other: nothing is compiled meanwhile."""
    if "torch._dynamo" in sys.modules:
        with torch.compiler.set_stance("force_eager"):
            yield
        return
    yield  # torch.compile was never used; importing it costs seconds
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


def _install() -> ExitStack:
    _warn_of_unknown_rules()
    with ExitStack() as stack:
        stack.enter_context(_register(_kernels()))
        # TorchScript's own derivatives assume that an operator keeps its input's dtype; autograd's do not
        script_op_by_op = torch.jit.optimized_execution(False)  # type: ignore[attr-defined]
        for context in (follow_torch_cache(), _fused_attention_off(), _no_graph_across(), script_op_by_op):
            stack.enter_context(context)
        return stack.pop_all()


@contextmanager
def cuda_autocast_rules() -> Iterator[None]:
    """Let CPU autocast follow CUDA's operator lists, in every thread, until the last open context ends.

    The fused inference path of nn.MultiheadAttention and nn.TransformerEncoderLayer is off meanwhile, as it is under
    CUDA autocast, and compiled models run eagerly. Nothing changes where autocast is off.
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
