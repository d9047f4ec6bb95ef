"""What a half region was handed before it was cast: whoever computes in FP32 inside it gets that, not the cast.

A regression target, a time step, a coordinate or a mask passes through the half code of a model untouched, and is used
where that computes in FP32. A cast that was changed in place since is no longer what was handed over. Activations,
tensors with a history of gradients, stay as the half unit hands them on.
"""

from __future__ import annotations

import functools
import threading
import weakref
from dataclasses import dataclass

import torch

__all__ = ["CASTS", "CastInput", "original_of", "traced_casts"]


@dataclass(slots=True, eq=False)
class CastInput:
    """One tensor that was cast.

    Attributes:
        original: what the outermost region that cast it was handed.
        given: what this region was handed; changes of the cast are carried over to it.
        cast: what its code gets.
        version: of the cast, from when on a change counts.
    """

    original: torch.Tensor
    given: torch.Tensor
    cast: torch.Tensor
    version: int


class _Casts(threading.local):
    """The casts of the regions that this thread is in, inner ones first. The frames of those regions hold them too."""

    known: tuple[CastInput, ...] = ()


CASTS = _Casts()
traced_casts: list[tuple[torch.Tensor, torch.Tensor]] = []
"""The same while a compiler traces, as (original, cast): it looks through lists, and not through threads."""

_used: dict[int, tuple[weakref.ref[torch.Tensor], torch.Tensor, int]] = {}
"""Storage of a cast whose original was used -> the cast, the original and the cast's version, while the cast lives.

A recomputation in the backward pass gets the cast, outside of any region, and computes with the original again."""


def original_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return what `tensor`, a cast or a view of one, was cast from; None where it is no cast, or was changed since."""
    if torch.compiler.is_compiling():
        for original, cast in traced_casts:
            if cast is tensor:
                return original
        return None
    known = CASTS.known
    if (not known and not _used) or tensor.dtype is torch.float32 or tensor.is_inference():
        return None
    place = _storage(tensor)
    for each in known:
        if each.cast is tensor or (place is not None and _storage(each.cast) == place):
            return _look_at(each.original, each.cast, each.version, tensor)
    if place is None or place not in _used:
        return None
    reference, original, version = _used[place]
    used = reference()
    return None if used is None else _look_at(original, used, version, tensor)


def _look_at(original: torch.Tensor, cast: torch.Tensor, version: int, tensor: torch.Tensor) -> torch.Tensor | None:
    """Look at the original as `tensor` looks at the cast; without gradients where `tensor` was detached."""
    is_activation = original.requires_grad and not original.is_leaf
    if is_activation or tensor._version != version or tensor.dtype is not cast.dtype:
        return None
    is_whole = tensor is cast or (tensor.shape == cast.shape and tensor.stride() == cast.stride())
    if not is_whole and original.stride() != cast.stride():
        return None
    _keep_for_recomputation(original, cast, version)
    if original.requires_grad and torch.is_grad_enabled() and not tensor.requires_grad:
        original = original.detach()
    if is_whole:
        return original
    offset = tensor.storage_offset() - cast.storage_offset() + original.storage_offset()
    return original.as_strided(tensor.shape, tensor.stride(), offset)


def _keep_for_recomputation(original: torch.Tensor, cast: torch.Tensor, version: int) -> None:
    place = _storage(cast)
    if place is not None and (place not in _used or _used[place][0]() is not cast):
        _used[place] = (weakref.ref(cast, functools.partial(_forget, place)), original, version)


def _forget(place: int, gone: weakref.ref[torch.Tensor]) -> None:
    if place in _used and _used[place][0] is gone:
        del _used[place]


def _storage(tensor: torch.Tensor) -> int | None:
    try:
        place: int = tensor.untyped_storage()._cdata
    except (RuntimeError, NotImplementedError):  # sparse tensors and those of a transform have none
        return None
    return place
