"""Cast the floating tensors in whatever a module takes or returns, and leave everything else as it is."""

from __future__ import annotations

import copy
import dataclasses
import types
from collections import deque
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import torch

from autoprec.apply.originals import CASTS, CastInput, original_of

__all__ = ["CASTABLE", "Copies", "cast_tree", "first_tensor"]

CASTABLE = frozenset({torch.float32, torch.float16, torch.bfloat16})
"""What a precision may cast. float64, complex, integers and booleans never change."""

_PLAIN = (str, bytes, int, float, complex, type(None), torch.dtype, torch.device)


class Copies:
    """What a cast had to copy, so that edits made to the copies reach the caller's own tensors and containers.

    One object has one copy, wherever it stands: `attention(x, x, x)` still gets one tensor.

    Args:
        assume_written: take every cast tensor as written to; for tracing, where versions cannot be compared.
    """

    __slots__ = ("assume_written", "known", "pairs", "tensors")

    def __init__(self, *, assume_written: bool | None = None) -> None:
        self.assume_written = assume_written
        self.known: dict[int, tuple[Any, Any]] = {}
        self.pairs: list[tuple[Any, Any, Any]] = []
        self.tensors: list[CastInput] = []

    def find(self, original: Any) -> Any:
        """Return the copy that was made of this object, None where there is none."""
        found = self.known.get(id(original))
        return None if found is None else found[1]

    def note_container(self, original: Any, copied: Any, items: Any) -> None:
        self.known[id(original)] = (original, copied)
        self.pairs.append((original, copied, items))

    def cast(self, value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Cast a tensor, or what that was cast from where it is a cast itself."""
        original = original_of(value)
        source = value if original is None else original
        if source.dtype == dtype:
            cast = source
        elif not torch.compiler.is_compiling() and torch.is_inference_mode_enabled():
            with torch.inference_mode(False):  # an inference tensor has no version that shows a change
                cast = source.to(dtype)
        else:
            cast = source.to(dtype)
        self.known[id(value)] = (value, cast)
        if self.assume_written is None:
            if not cast.is_inference():
                self.tensors.append(CastInput(source, value, cast, cast._version))
        elif self.assume_written:
            self.tensors.append(CastInput(source, value, cast, -1))
        return cast

    def write_back(self) -> None:
        """Carry over in-place changes of cast tensors and items set, replaced or deleted in copied containers."""
        for each in self.tensors:
            if each.version == -1 or each.cast._version != each.version:
                each.given.copy_(each.cast)
                for outer in CASTS.known:  # the original itself was written to: nothing is left to carry over
                    is_given = outer.cast is each.given or outer.cast is each.given._base
                    if is_given and outer.given is outer.original is not None and each.cast is not each.given:
                        outer.version = outer.cast._version
        for original, copied, snapshot in self.pairs:
            if isinstance(copied, (list, deque)):
                _write_back_sequence(original, copied, snapshot)
                continue
            if not isinstance(copied, Mapping):
                _write_back_attributes(original, _attributes(copied), snapshot)
                continue
            for key in [key for key in original if key not in copied]:
                del original[key]
            for key, item in copied.items():
                if key not in snapshot or snapshot[key] is not item:
                    original[key] = item


def _write_back_attributes(original: Any, current: dict[str, Any], snapshot: dict[str, Any]) -> None:
    for name in snapshot.keys() - current.keys():
        object.__delattr__(original, name)
    for name, item in current.items():
        if name not in snapshot or snapshot[name] is not item:
            object.__setattr__(original, name, item)


def _write_back_sequence(original: Any, copied: Any, snapshot: list[Any]) -> None:
    if len(copied) == len(snapshot) and all(a is b for a, b in zip(copied, snapshot, strict=True)):
        return
    kept = {id(cast): item for cast, item in zip(snapshot, list(original), strict=True)}
    items = [kept.get(id(item), item) for item in copied]
    original.clear()
    original.extend(items)


def cast_tree(value: Any, dtype: torch.dtype, copies: Copies | None = None) -> Any:
    """Return `value` with its floating tensors in `dtype`; the same object where nothing changes.

    Containers keep their class: tuples, named tuples, lists, deques, mappings (dataclass-like ones too), dataclasses
    and simple namespaces. Without `copies` (outputs), a single FP32 number, such as a loss, is never narrowed.
    """
    if isinstance(value, torch.Tensor):
        if value.dtype == dtype or value.dtype not in CASTABLE:
            return value
        if copies is None:
            if value.ndim == 0 and dtype != torch.float32:
                return value
            original = original_of(value)
            return (value if original is None else original).to(dtype)
        known: torch.Tensor | None = copies.find(value)
        return copies.cast(value, dtype) if known is None else known
    if isinstance(value, _PLAIN):
        return value
    if copies is not None and (found := copies.find(value)) is not None:
        return found
    if isinstance(value, tuple):
        return _cast_tuple(value, dtype, copies)
    if isinstance(value, (list, deque)):
        return _cast_sequence(value, dtype, copies)
    if isinstance(value, Mapping):
        return _cast_mapping(value, dtype, copies)
    if isinstance(value, types.SimpleNamespace):
        return _cast_attributes(value, list(vars(value)), dtype, copies)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _cast_attributes(value, [field.name for field in dataclasses.fields(value)], dtype, copies)
    return value


def _cast_tuple(value: tuple[Any, ...], dtype: torch.dtype, copies: Copies | None) -> Any:
    items = [cast_tree(item, dtype, copies) for item in value]
    if all(new is old for new, old in zip(items, value, strict=True)):
        return value
    if type(value) is tuple:
        return tuple(items)
    if hasattr(value, "_fields"):
        return value._make(items)  # type: ignore[attr-defined]
    try:
        copied = tuple.__new__(type(value), items)  # a constructor of its own may want other arguments
    except TypeError:  # what torch's own functions return
        return type(value)(items)
    getattr(copied, "__dict__", {}).update(getattr(value, "__dict__", {}))
    return copied


def _cast_sequence(value: Any, dtype: torch.dtype, copies: Copies | None) -> Any:
    items = [cast_tree(item, dtype, copies) for item in value]
    if all(new is old for new, old in zip(items, value, strict=True)):
        return value
    if type(value) is list:
        copied: Any = items
    else:
        copied = copy.copy(value)
        copied.clear()
        copied.extend(items)
    if copies is not None:
        copies.note_container(value, copied, list(items))
    return copied


def _cast_mapping(value: Mapping[Any, Any], dtype: torch.dtype, copies: Copies | None) -> Any:
    items = {key: cast_tree(item, dtype, copies) for key, item in value.items()}
    if all(items[key] is item for key, item in value.items()):
        return value
    if type(value) is dict:
        copied: Any = dict(items)
    elif isinstance(value, MutableMapping):
        copied = _with_items(value, items)
    elif isinstance(value, types.MappingProxyType):
        return types.MappingProxyType(items)
    else:
        return type(value)(items)  # type: ignore[call-arg]
    if copies is not None:
        copies.note_container(value, copied, items)
    return copied


def _with_items(value: MutableMapping[Any, Any], items: dict[Any, Any]) -> Any:
    """Copy a mapping of any class; attributes that hold the same tensors (as model outputs have) follow the items."""
    try:
        copied = copy.copy(value)
    except TypeError:  # a class whose constructor needs arguments
        copied = type(value).__new__(type(value))
        vars(copied).update(vars(value))
    replaced = {id(value[key]): item for key, item in items.items() if value[key] is not item}
    for key, item in items.items():
        copied[key] = item
    for name, attribute in list(getattr(copied, "__dict__", {}).items()):
        if id(attribute) in replaced:
            object.__setattr__(copied, name, replaced[id(attribute)])
    return copied


def _cast_attributes(value: Any, names: list[str], dtype: torch.dtype, copies: Copies | None) -> Any:
    items = {name: cast_tree(getattr(value, name), dtype, copies) for name in names if hasattr(value, name)}
    changed = {name: item for name, item in items.items() if item is not getattr(value, name)}
    if not changed:
        return value
    copied = copy.copy(value)
    for name, item in changed.items():
        object.__setattr__(copied, name, item)
    if copies is not None:
        copies.note_container(value, copied, _attributes(copied))
    return copied


def _attributes(value: Any) -> dict[str, Any]:
    if hasattr(value, "__dict__"):
        return dict(vars(value))
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if hasattr(value, field.name)}


def first_tensor(*values: Any) -> torch.Tensor | None:
    """Return the first tensor found in the values (depth first), None where there is none."""
    return next(_tensors(values), None)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list, deque)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _tensors(getattr(value, field.name, None))
