"""What runs at a module's forward once a policy is installed: the root, regions, and members of half regions.

Installed as `module.forward = functools.partial(run_..., module, region)`: a module-level function with plain data, so
that the whole model pickles, copies, compiles and exports. While torch.compile or torch.export traces, the caches, the
locks and the thread-local state are left out: the compiler merges equal casts by itself.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from autoprec.apply.losses import FP32Losses
from autoprec.apply.shadow import CastCache, Shadow
from autoprec.apply.trees import Copies, cast_tree, first_tensor
from autoprec.emulation import is_emulating
from autoprec.errors import PrecisionWarning
from autoprec.policy import Policy, Precision

__all__ = ["Region", "Root", "run_root", "run_region", "num_regions_entered", "num_weight_casts"]


class Lock:
    """A re-entrant lock that copies and pickles as a new one."""

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *exception: object) -> None:
        self._lock.release()

    def __reduce__(self) -> tuple[Any, ...]:
        return (Lock, ())


@dataclass(eq=False)
class Region:
    """How one module computes."""

    precision: Precision
    dtype: torch.dtype
    """The dtype of floating inputs for fp32, fp16 and bf16; the autocast dtype for autocast."""
    inner: Callable[..., Any] | None = None
    """The user's own instance forward, given back by remove_policy; None for the class's."""
    lock: Lock = field(default_factory=Lock)
    members: list[tuple[nn.Module, set[str]]] = field(default_factory=list)
    """The modules whose weights are cast when the region is entered, this one first, each with the names of the buffers
    that its forward writes to; empty where there is nothing to cast."""
    owns_tensors: bool = False
    runs: list[tuple[list[str], Region]] | None = None
    """For an nn.Sequential of several precisions: neighbours of equal precision are one region."""
    protect_losses: bool = False
    without_fastpath: bool = False

    @property
    def key(self) -> tuple[str, torch.dtype]:
        return (self.precision, self.dtype)


@dataclass(eq=False)
class Root:
    """The root's own region and what the whole forward needs to know."""

    policy: Policy
    region: Region
    uses_autocast: bool
    uses_fp16: bool
    autocast_dtype: torch.dtype


class _Local(threading.local):
    key: tuple[str, torch.dtype] | None = None
    cache: CastCache | None = None
    num_regions = 0
    num_casts = 0


_LOCAL = _Local()


def num_regions_entered() -> int:
    """Return how many regions the last root forward of this thread entered, the root's own included."""
    return _LOCAL.num_regions


def num_weight_casts() -> int:
    """Return how many weights the last root forward of this thread cast for its half regions."""
    return _LOCAL.num_casts


def run_root(module: nn.Module, root: Root, /, *args: Any, **kwargs: Any) -> Any:
    """Run the root's forward under its policy; floating outputs come back in FP32."""
    if torch.compiler.is_compiling():
        with _autocast_of_root(root, _device_type(module, args, kwargs)):
            return cast_tree(run_region(module, root.region, *args, **kwargs), torch.float32)
    device_type = _device_type(module, args, kwargs)
    if root.uses_fp16 and device_type == "cpu" and not is_emulating():
        message = "FP16 on a CPU is slow in torch; `with autoprec.emulate():` computes it in FP32 and rounds once"
        warnings.warn(message, PrecisionWarning, stacklevel=4)
    local = _LOCAL
    outer = (local.key, local.cache)
    local.key, local.cache = None, CastCache()
    local.num_regions = 0
    autocast = _autocast_of_root(root, device_type)
    clear = not isinstance(autocast, nullcontext)
    try:
        if clear:
            torch.clear_autocast_cache()
        with autocast:
            output = run_region(module, root.region, *args, **kwargs)
        return cast_tree(output, torch.float32)
    finally:
        if clear:
            torch.clear_autocast_cache()
        local.num_casts = local.cache.num_casts if local.cache else 0
        local.key, local.cache = outer


def run_region(module: nn.Module, region: Region, /, *args: Any, **kwargs: Any) -> Any:
    """Run one module's forward in its precision; nothing but input casts where that precision is in force already."""
    compiling = torch.compiler.is_compiling()
    entered = not compiling and _LOCAL.key == region.key
    if region.precision == "autocast":
        if entered:
            return _call(module, region, args, kwargs)
        with _context(region, _device_type(module, args, kwargs), compiling):
            return _call(module, region, args, kwargs)
    copies = Copies()
    inputs = tuple([cast_tree(value, region.dtype, copies) for value in args])
    named = {name: cast_tree(value, region.dtype, copies) for name, value in kwargs.items()}
    context = nullcontext() if entered else _context(region, _device_type(module, args, kwargs), compiling)
    with context:
        output = _call_shadowed(module, region, inputs, named, whole=not entered)
    if copies.pairs:
        copies.write_back()
    return output if entered else cast_tree(output, region.dtype)


def _run_sequence(module: nn.Module, runs: list[tuple[list[str], Region]], value: Any) -> Any:
    """Run an `nn.Sequential`, entering each run of neighbours of one precision once."""
    compiling = torch.compiler.is_compiling()
    for names, run in runs:
        children = [module._modules[name] for name in names if name in module._modules]
        if compiling or len(children) == 1 or _LOCAL.key == run.key:
            for child in children:
                value = child(value)  # type: ignore[misc]
            continue
        with _context(run, _device_type(module, (value,), {}), compiling):
            if run.precision != "autocast":
                value = cast_tree(value, run.dtype)
            for child in children:
                value = child(value)  # type: ignore[misc]
            if run.precision != "autocast":
                value = cast_tree(value, run.dtype)
    return value


class _Entered:
    """The region's autocast state, recorded as the precision in force in this thread."""

    __slots__ = ("autocast", "key", "outer")

    def __init__(self, region: Region, device_type: str) -> None:
        self.key = region.key
        self.autocast = _autocast(device_type, region.dtype, region.precision == "autocast")

    def __enter__(self) -> None:
        self.outer = _LOCAL.key
        _LOCAL.key = self.key
        _LOCAL.num_regions += 1
        self.autocast.__enter__()

    def __exit__(self, *exception: Any) -> None:
        self.autocast.__exit__(*exception)
        _LOCAL.key = self.outer


def _context(region: Region, device_type: str, compiling: bool) -> AbstractContextManager[Any]:
    if compiling:
        return _autocast(device_type, region.dtype, region.precision == "autocast")
    return _Entered(region, device_type)


def _autocast(device_type: str, dtype: torch.dtype, enabled: bool) -> AbstractContextManager[Any]:
    if not torch.amp.is_autocast_available(device_type):
        return nullcontext()
    if enabled:
        if torch.is_autocast_enabled(device_type) and torch.get_autocast_dtype(device_type) == dtype:
            return nullcontext()
        return torch.autocast(device_type, dtype=dtype)
    return torch.autocast(device_type, enabled=False) if torch.is_autocast_enabled(device_type) else nullcontext()


def _autocast_of_root(root: Root, device_type: str) -> AbstractContextManager[Any]:
    """The outermost context of a forward: it keeps the cache of casts for all autocast regions in it."""
    if not torch.amp.is_autocast_available(device_type):
        return nullcontext()
    if root.uses_autocast:
        return torch.autocast(device_type, dtype=root.autocast_dtype, enabled=root.region.precision == "autocast")
    return torch.autocast(device_type, enabled=False) if torch.is_autocast_enabled(device_type) else nullcontext()


def _call_shadowed(module: nn.Module, region: Region, args: Any, kwargs: Any, *, whole: bool) -> Any:
    if not region.members or not (whole or region.owns_tensors):
        return _call(module, region, args, kwargs)
    compiling = torch.compiler.is_compiling()
    shadow = Shadow(region.dtype, None if compiling else _LOCAL.cache)
    with nullcontext() if compiling else region.lock:
        try:
            for member, written in region.members if whole else region.members[:1]:
                shadow.enter(member, written, skip_sharded=member is not module)
            return _call(module, region, args, kwargs)
        finally:
            shadow.leave()


def _call(module: nn.Module, region: Region, args: Any, kwargs: Any) -> Any:
    if region.runs is not None and len(args) == 1 and not kwargs:
        return _run_sequence(module, region.runs, args[0])
    if not (region.protect_losses or region.without_fastpath):
        if region.inner is not None:
            return region.inner(*args, **kwargs)
        return type(module).forward(module, *args, **kwargs)
    with ExitStack() as stack:
        if region.protect_losses and region.precision != "autocast":
            stack.enter_context(FP32Losses())
        if region.without_fastpath and not torch.compiler.is_compiling():
            stack.enter_context(_WITHOUT_FASTPATH)
        forward = region.inner or type(module).forward.__get__(module)
        return forward(*args, **kwargs)


class _WithoutFastpath:
    """Switch off the fused inference paths of torch's transformer layers, which skip their children; counts users."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_users = 0
        self._before = True

    def __enter__(self) -> None:
        with self._lock:
            if self._num_users == 0:
                self._before = torch.backends.mha.get_fastpath_enabled()
                torch.backends.mha.set_fastpath_enabled(False)
            self._num_users += 1

    def __exit__(self, *exception: object) -> None:
        with self._lock:
            self._num_users -= 1
            if self._num_users == 0:
                torch.backends.mha.set_fastpath_enabled(self._before)


_WITHOUT_FASTPATH = _WithoutFastpath()


def _device_type(module: nn.Module, args: Any, kwargs: Any) -> str:
    for value in args:
        if isinstance(value, torch.Tensor):
            return value.device.type
    tensor = first_tensor(args, kwargs)
    if tensor is None:
        tensor = next(module.parameters(), None)
    return "cpu" if tensor is None else tensor.device.type
