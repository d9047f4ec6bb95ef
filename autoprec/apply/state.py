"""What a thread knows while a model with a policy runs: the region in force, the casts made, the counts."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.fx import Proxy

from autoprec.apply.casts import CastCache
from autoprec.apply.trees import first_tensor
from autoprec.errors import ApplyError

__all__ = ["LOCAL", "Entered", "Lock", "autocast", "device_type_of", "num_regions_entered", "num_weight_casts"]


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


class _Local(threading.local):
    """`key` is the region in force; `task` the backward pass it was entered in (-1 for none), since a recomputation
    does not inherit the region of the code that called backward."""

    key: str = ""
    task: int = -1
    root: object = None
    cache: CastCache | None = None
    covered: frozenset[int] = frozenset()
    num_regions = 0
    num_casts = 0


LOCAL = _Local()


def num_regions_entered() -> int:
    """Return how many regions the last root forward of this thread entered, the root's own included."""
    return LOCAL.num_regions


def num_weight_casts() -> int:
    """Return how many weights the last root forward of this thread cast for its half regions."""
    return LOCAL.num_casts


class Entered:
    """A region's autocast state, recorded as what is in force in this thread."""

    __slots__ = ("autocast", "key", "outer")

    def __init__(self, key: str, context: AbstractContextManager[Any]) -> None:
        self.key = key
        self.autocast = context

    def __enter__(self) -> None:
        local = LOCAL
        self.outer = (local.key, local.task, local.covered)
        self.autocast.__enter__()
        local.key, local.task = self.key, torch._C._current_graph_task_id()
        local.num_regions += 1

    def __exit__(self, *exception: Any) -> None:
        LOCAL.key, LOCAL.task, LOCAL.covered = self.outer
        self.autocast.__exit__(*exception)


def autocast(device_type: str, dtype: torch.dtype, *, enabled: bool) -> AbstractContextManager[Any]:
    """Return the context that brings autocast into a state; none where it is in that state or the device has none."""
    if "," in device_type:
        return _autocast_on_each(device_type.split(","), dtype, enabled)
    if not torch.amp.is_autocast_available(device_type):
        return nullcontext()
    if not enabled:
        return torch.autocast(device_type, enabled=False) if torch.is_autocast_enabled(device_type) else nullcontext()
    if torch.is_autocast_enabled(device_type) and torch.get_autocast_dtype(device_type) == dtype:
        return nullcontext()
    return torch.autocast(device_type, dtype=dtype)


@contextmanager
def _autocast_on_each(device_types: list[str], dtype: torch.dtype, enabled: bool) -> Iterator[None]:
    with ExitStack() as stack:
        for device_type in device_types:
            stack.enter_context(autocast(device_type, dtype, enabled=enabled))
        yield


def device_type_of(module: nn.Module, args: Any, kwargs: Any) -> str:
    """Return the device type that a forward computes on; two with a comma where inputs and weights lie apart."""
    tensor = None
    for value in args:
        if isinstance(value, torch.Tensor):
            tensor = value
            break
    if tensor is None:
        tensor = first_tensor(args, kwargs)
        if tensor is None:
            _refuse_tracing([*args, *kwargs.values()])
    found = None if tensor is None else tensor.device.type
    if found is not None and (found != "cpu" or torch.compiler.is_compiling() or not _has_accelerator()):
        return found
    parameter = next(module.parameters(), None)
    if parameter is None or parameter.device.type == found:
        return found or "cpu"
    return parameter.device.type if found is None else f"{found},{parameter.device.type}"


@cache
def _has_accelerator() -> bool:
    return torch.accelerator.is_available()


def _refuse_tracing(values: list[Any]) -> None:
    """Refuse torch.fx's symbolic tracing, which records neither casts nor autocast."""
    if any(isinstance(value, Proxy) for value in values):
        raise ApplyError(
            "torch.fx cannot trace a model with a policy; trace the bare model and apply the policy to the GraphModule"
        )
