"""Cast the floating tensors in whatever a module takes or returns, and leave everything else as it is."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import torch

__all__ = ["CASTABLE", "cast_tree", "Copies", "first_tensor"]

CASTABLE = frozenset({torch.float32, torch.float16, torch.bfloat16})
"""What a precision may cast. float64, complex, integers and booleans never change."""

_PLAIN = (str, bytes, int, float, complex, type(None), torch.dtype, torch.device)


class Copies:
    """The mutable containers that a cast had to copy, so that edits made to the copies reach the caller's own."""

    __slots__ = ("pairs",)

    def __init__(self) -> None:
        self.pairs: list[tuple[Any, Any, Any]] = []

    def write_back(self) -> None:
        """Carry every item that was set, replaced or deleted in a copy over to the original container."""
        for original, copied, snapshot in self.pairs:
            if isinstance(copied, list):
                if len(copied) != len(snapshot) or any(a is not b for a, b in zip(copied, snapshot, strict=True)):
                    kept = {id(cast): item for cast, item in zip(snapshot, list(original), strict=True)}
                    original[:] = [kept.get(id(item), item) for item in copied]
                continue
            for key in [key for key in original if key not in copied]:
                del original[key]
            for key, item in copied.items():
                if key not in snapshot or snapshot[key] is not item:
                    original[key] = item


def cast_tree(value: Any, dtype: torch.dtype, copies: Copies | None = None) -> Any:
    """Return `value` with its floating tensors in `dtype`; the same object where nothing changes.

    Containers keep their class: tuples, named tuples, lists, mappings (dataclass-like ones too) and dataclasses.
    """
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.dtype != dtype and value.dtype in CASTABLE else value
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, tuple):
        return _cast_tuple(value, dtype, copies)
    if isinstance(value, list):
        return _cast_list(value, dtype, copies)
    if isinstance(value, Mapping):
        return _cast_mapping(value, dtype, copies)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _cast_dataclass(value, dtype, copies)
    return value


def _cast_tuple(value: tuple[Any, ...], dtype: torch.dtype, copies: Copies | None) -> Any:
    items = [cast_tree(item, dtype, copies) for item in value]
    if all(new is old for new, old in zip(items, value, strict=True)):
        return value
    if type(value) is tuple:
        return tuple(items)
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)


def _cast_list(value: list[Any], dtype: torch.dtype, copies: Copies | None) -> Any:
    items = [cast_tree(item, dtype, copies) for item in value]
    if all(new is old for new, old in zip(items, value, strict=True)):
        return value
    if type(value) is list:
        copied = items
    else:
        copied = copy.copy(value)
        copied[:] = items
    if copies is not None:
        copies.pairs.append((value, copied, list(items)))
    return copied


def _cast_mapping(value: Mapping[Any, Any], dtype: torch.dtype, copies: Copies | None) -> Any:
    items = {key: cast_tree(item, dtype, copies) for key, item in value.items()}
    if all(items[key] is item for key, item in value.items()):
        return value
    if type(value) is dict:
        copied: Any = dict(items)
    elif isinstance(value, MutableMapping):
        copied = copy.copy(value)
        for key, item in items.items():
            copied[key] = item
    else:
        return value
    if copies is not None:
        copies.pairs.append((value, copied, items))
    return copied


def _cast_dataclass(value: Any, dtype: torch.dtype, copies: Copies | None) -> Any:
    fields = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
    items = {name: cast_tree(getattr(value, name), dtype, copies) for name in fields}
    changed = {name: item for name, item in items.items() if item is not getattr(value, name)}
    if not changed:
        return value
    copied = copy.copy(value)
    for name, item in changed.items():
        object.__setattr__(copied, name, item)
    return copied


def first_tensor(*values: Any) -> torch.Tensor | None:
    """Return the first tensor found in the values (depth first), None where there is none."""
    return next(_tensors(values), None)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _tensors(getattr(value, field.name, None))
