"""Modes of the process that code can enter and not leave: hooks, contexts, patched functions, timers.

They are put back where that can be done; a process in which any was left runs no further trial (`Health`), since the
code that set one may count on it.
"""

from __future__ import annotations

import builtins
import contextlib
import gc
import inspect
import math
import random
import signal
import socket
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn, overrides
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils._python_dispatch import _pop_mode as _pop_dispatch_mode

__all__ = ["Modes"]

_MODULE_HOOKS = "torch.nn.modules.module"
_OPTIMIZER_HOOKS = "torch.optim.optimizer"
TIMERS = ("ITIMER_REAL", "ITIMER_VIRTUAL", "ITIMER_PROF")

_MISSING: Any = types.SimpleNamespace()
_ENTERED: list[Any] = []
"""Contexts that end with their objects."""

Mode = tuple[str, Callable[[], Any], Callable[[Any], object]]
"""What it is called, how it is read, and how a value that was read is put back."""


class Modes:
    """The modes of this process at one moment."""

    def __init__(self) -> None:
        self._values = [(name, write, read, read()) for name, read, write in _MODES]
        self._hooks = [(name, hooks, dict(hooks)) for name, hooks in _hook_tables()]
        self._functions = [(place, dict(vars(place))) for place in _namespaces()]

    def restore(self) -> list[str]:
        """Put all back as it was, and return the names of what was not."""
        left = []
        for name, hooks, before in self._hooks:
            if hooks != before:
                left.append(name)
                hooks.clear()
                hooks.update(before)
        for place, before in self._functions:
            for name in _changed(place, before):
                left.append(f"{place.__name__}.{name}")
                if name in before:
                    setattr(place, name, before[name])
                else:
                    delattr(place, name)
        for name, write, read, value in self._values:
            if not _is_same(read(), value):
                left.append(name)
                with contextlib.suppress(Exception):  # another thread than the main one, say: the process is replaced
                    write(value)
        return left


def _is_same(found: Any, before: Any) -> bool:
    try:
        return bool(found is before or found == before)
    except Exception:  # objects of the task's own
        return False


def _changed(place: Any, before: dict[str, Any]) -> Iterator[str]:
    """Yield the names of the functions that were replaced, or laid over those of a base class."""
    now = dict(vars(place))
    for name, found in now.items():
        value = before.get(name, _MISSING)
        if found is value or (value is _MISSING and inspect.ismodule(place)):  # a part that was loaded since
            continue
        if value is _MISSING:
            value = next((vars(base)[name] for base in place.__mro__[1:] if name in vars(base)), _MISSING)
        if not (callable(value) or isinstance(value, classmethod | property)):
            continue
        # An optimizer class gets its profiling hook round `step` with its first instance.
        if not (getattr(found, "hooked", False) and getattr(found, "__wrapped__", None) is value):
            yield name
    yield from (name for name, value in before.items() if name not in now and callable(value))


def _namespaces() -> list[Any]:
    """Return the modules and classes whose functions a training uses."""
    modules: list[types.ModuleType] = [
        torch,
        nn.functional,
        nn.init,
        nn.utils,
        np,
        np.random,
        random,
        time,
        math,
        builtins,
    ]
    classes: dict[type, None] = {torch.Tensor: None, torch.amp.GradScaler: None, torch.utils.data.DataLoader: None}
    for holder in (nn, torch.optim, torch.optim.lr_scheduler):
        classes |= dict.fromkeys(each for each in vars(holder).values() if inspect.isclass(each))
    return [*modules, *classes]


def _hook_tables() -> Iterator[tuple[str, dict[Any, Any]]]:
    for module, name in ((_MODULE_HOOKS, "a global module hook"), (_OPTIMIZER_HOOKS, "a global optimizer hook")):
        for key, table in vars(sys.modules[module]).items():
            if key.startswith("_global_") and isinstance(table, dict):
                yield name, table


def _saved_tensors_hooks() -> Any:
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def _leave_saved_tensors_hooks(before: Any) -> None:
    while (top := _saved_tensors_hooks()) is not None and top != before:
        torch._C._autograd._pop_saved_tensors_default_hooks()


def _set_saved_tensors_hooks_enabled(enabled: bool) -> None:
    if enabled:
        torch._C._autograd._saved_tensors_hooks_enable()
    else:
        torch._C._autograd._saved_tensors_hooks_disable("as before")


def _set_inference_mode(enabled: bool) -> None:
    """Enter a mode that outlives this call: the one that was left open cannot be closed without its object."""
    mode = torch.inference_mode(enabled)
    mode.__enter__()
    _ENTERED.append(mode)


def _autocast_depth() -> int:
    """Return how many autocast regions are open: inside one the casts of weights are kept from step to step."""
    torch.autocast_increment_nesting()
    return int(torch.autocast_decrement_nesting())


def _set_autocast_depth(depth: int) -> None:
    while _autocast_depth() > depth:
        torch.autocast_decrement_nesting()
    torch.clear_autocast_cache()


def _function_modes() -> list[int]:
    return [id(mode) for mode in overrides._get_current_function_mode_stack()]  # type: ignore[no-untyped-call]


def _leave_function_modes(before: list[Any]) -> None:
    while len(_function_modes()) > len(before):
        overrides._pop_mode()  # type: ignore[no-untyped-call]


def _leave_dispatch_modes(before: list[Any]) -> None:
    while len(_get_current_dispatch_mode_stack()) > len(before):
        _pop_dispatch_mode()


def _flushes_denormals() -> bool:
    return float(torch.full((), 2.0**-140) * 1.0) == 0.0


def _leave_dual_level(before: int) -> None:
    forward_ad = torch.autograd.forward_ad
    while forward_ad._current_level > before:
        forward_ad.exit_dual_level(level=forward_ad._current_level)  # type: ignore[no-untyped-call]


def _signal_handlers() -> dict[int, Any]:
    return {number: signal.getsignal(number) for number in sorted(signal.valid_signals())}


def _set_signal_handlers(before: dict[int, Any]) -> None:
    for number, handler in before.items():
        if signal.getsignal(number) is not handler and handler is not None:
            signal.signal(number, handler)


def _timers() -> list[bool]:
    return [signal.getitimer(getattr(signal, name))[0] > 0 for name in TIMERS if hasattr(signal, name)]


def _stop_timers(before: list[bool]) -> None:
    for name, was_armed in zip((name for name in TIMERS if hasattr(signal, name)), before, strict=True):
        if not was_armed:
            signal.setitimer(getattr(signal, name), 0.0)


def _attribute(name: str, holder: Any, attribute: str) -> Mode:
    return name, lambda: getattr(holder, attribute), lambda value: setattr(holder, attribute, value)


def _torch_modes() -> Iterator[Mode]:
    yield "inference_mode", torch.is_inference_mode_enabled, _set_inference_mode
    yield "saved_tensors_hooks", _saved_tensors_hooks, _leave_saved_tensors_hooks
    yield (
        "saved tensors' hooks disabled",
        torch._C._autograd._saved_tensors_hooks_is_enabled,  # type: ignore[attr-defined]
        _set_saved_tensors_hooks_enabled,
    )
    yield "autocast", _autocast_depth, _set_autocast_depth
    yield "a function mode", _function_modes, _leave_function_modes
    yield "a dispatch mode", lambda: [id(m) for m in _get_current_dispatch_mode_stack()], _leave_dispatch_modes
    yield "forward-mode differentiation", lambda: torch.autograd.forward_ad._current_level, _leave_dual_level
    yield (
        "autograd's threads",
        torch._C._is_multithreading_enabled,
        lambda on: torch._C._set_multithreading_enabled(on),
    )
    yield "view replay", torch._C._is_view_replay_enabled, lambda on: torch._C._set_view_replay_enabled(on)
    yield "flush_denormal", _flushes_denormals, torch.set_flush_denormal
    yield (
        "check_nan of the anomaly mode",
        torch.is_anomaly_check_nan_enabled,
        lambda on: torch.set_anomaly_enabled(torch.is_anomaly_enabled(), on),
    )
    yield "warn_always", torch.is_warn_always_enabled, torch.set_warn_always
    yield (
        "invariants of sparse tensors",
        torch.sparse.check_sparse_tensor_invariants.is_enabled,
        lambda on: (torch.sparse.check_sparse_tensor_invariants.enable if on else _no_sparse_checks)(),
    )
    yield _attribute("opt_einsum", torch.backends.opt_einsum, "enabled")
    yield _attribute("opt_einsum's strategy", torch.backends.opt_einsum, "strategy")
    yield (
        "overwrite_module_params_on_conversion",
        torch.__future__.get_overwrite_module_params_on_conversion,
        torch.__future__.set_overwrite_module_params_on_conversion,
    )
    yield (
        "swap_module_params_on_conversion",
        torch.__future__.get_swap_module_params_on_conversion,
        torch.__future__.set_swap_module_params_on_conversion,
    )
    yield _attribute("validate_args of distributions", torch.distributions.Distribution, "_validate_args")
    yield _attribute("caching of parametrizations", nn.utils.parametrize, "_cache_enabled")
    yield "NNPACK", torch._C._get_nnpack_enabled, torch._C._set_nnpack_enabled
    yield "deterministic oneDNN", torch._C._get_mkldnn_deterministic, torch._C._set_mkldnn_deterministic


def _no_sparse_checks() -> None:
    torch.sparse.check_sparse_tensor_invariants.disable()  # type: ignore[no-untyped-call]


def _python_modes() -> Iterator[Mode]:
    yield "an armed timer", _timers, _stop_timers
    yield "a signal's handler", _signal_handlers, _set_signal_handlers
    yield "blocked signals", lambda: signal.pthread_sigmask(signal.SIG_BLOCK, []), _set_signal_mask
    yield "garbage collection", gc.isenabled, lambda on: gc.enable() if on else gc.disable()
    yield "thresholds of the garbage collection", gc.get_threshold, lambda values: gc.set_threshold(*values)
    yield "a trace function", sys.gettrace, sys.settrace
    yield "a profile function", sys.getprofile, sys.setprofile
    yield "a trace function of threads", threading.gettrace, threading.settrace
    yield "a profile function of threads", threading.getprofile, threading.setprofile
    yield "the recursion limit", sys.getrecursionlimit, sys.setrecursionlimit
    yield "the switch interval", sys.getswitchinterval, sys.setswitchinterval
    yield "numpy's handling of errors", np.geterr, lambda value: np.seterr(**value)
    yield "a time limit of sockets", socket.getdefaulttimeout, socket.setdefaulttimeout


def _set_signal_mask(before: set[Any]) -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


_MODES: tuple[Mode, ...] = (*_torch_modes(), *_python_modes())
