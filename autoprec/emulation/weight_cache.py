"""autocast's cache of weight casts, for the kernels that torch's own cache does not serve.

The rules are those of `at::autocast::cached_cast` (torch 2.14.1, aten/src/ATen/autocast_mode.cpp): only the cast of a
trainable FP32 leaf that is no view is kept, the key ignores the dtype, and the cache is emptied where the outermost
autocast region ends. A weight used both by an operator served here and by one served by torch is cast once by each.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

__all__ = ["cached_cast", "follow_torch_cache"]

_casts: dict[int, tuple[weakref.ref[torch.Tensor], torch.Tensor]] = {}
_lock = threading.Lock()


def _may_be_kept(tensor: torch.Tensor) -> bool:
    return (
        tensor.dtype is torch.float32
        and tensor.requires_grad
        and tensor.is_leaf
        and not tensor._is_view()
        and torch.is_autocast_cache_enabled()
        and not torch.is_inference_mode_enabled()
    )


def cached_cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return `tensor` in `dtype`, from the cache where autocast would keep its cast."""
    if not _may_be_kept(tensor):
        return tensor.to(dtype)
    with _lock:
        found = _casts.get(id(tensor))
    if found is not None and found[0]() is tensor:
        return found[1]
    with torch.enable_grad():  # a cast kept without history would leave later training uses without a gradient
        cast = tensor.to(dtype)
    with _lock:
        _casts[id(tensor)] = (weakref.ref(tensor), cast)
    return cast


def _clear() -> None:
    with _lock:
        _casts.clear()


@contextmanager
def follow_torch_cache() -> Iterator[None]:
    """Empty this cache whenever `torch.clear_autocast_cache` is called, as autocast does at its outermost exit."""
    original: Callable[[], None] = torch.clear_autocast_cache

    def clear_autocast_cache() -> None:
        _clear()
        original()

    torch.clear_autocast_cache = clear_autocast_cache
    try:
        yield
    finally:
        torch.clear_autocast_cache = original
        _clear()
