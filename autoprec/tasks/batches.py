"""Batches of any shape: counting their samples, moving them, and going through them again and again."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from itertools import zip_longest
from typing import Any

import torch
from torch.utils.data import DataLoader

from autoprec.errors import TaskError
from autoprec.tasks.protocol import Batch, Batches, OneShot

__all__ = [
    "count_samples",
    "cut_batch",
    "move_batch",
    "map_tensors",
    "tensors_of",
    "non_finite_in",
    "same_values",
    "stored_values",
    "open_batches",
    "describe_loader",
    "longest_batch",
    "BatchStream",
]


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], batch: Batch) -> Batch:
    """Apply `function` to every tensor in tuples, lists, mappings, named tuples and dataclasses.

    Containers keep their class; where no tensor changed, the very same object comes back.
    """
    if isinstance(batch, torch.Tensor):
        return function(batch)
    if isinstance(batch, Mapping):
        items = {key: map_tensors(function, value) for key, value in batch.items()}
        return batch if _same(items.values(), batch.values()) else _like(batch, items)
    if isinstance(batch, tuple | list):
        parts = [map_tensors(function, part) for part in batch]
        if _same(parts, batch):
            return batch
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        values = {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch) if hasattr(batch, f.name)}
        changed = {key: map_tensors(function, value) for key, value in values.items()}
        return batch if _same(changed.values(), values.values()) else _with_fields(batch, changed)
    return batch


def _same(new: Iterable[Any], old: Iterable[Any]) -> bool:
    return all(a is b for a, b in zip(new, old, strict=True))


def _like(batch: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    if type(batch) is dict:
        return items
    try:
        changed: Any = copy.copy(batch)  # a constructor may want something else than the items (defaultdict)
        for key, value in items.items():
            changed[key] = value
    except TypeError:  # a mapping that cannot be copied or changed (MappingProxyType)
        return items
    return changed


def _with_fields(batch: Any, values: dict[str, Any]) -> Any:
    """Copy a dataclass and set its fields: its own constructor may check, convert or leave some of them out."""
    changed = copy.copy(batch)
    for key, value in values.items():
        object.__setattr__(changed, key, value)
    return changed


def tensors_of(batch: Batch) -> list[torch.Tensor]:
    """Return the tensors of a batch or of a module's output, depth first."""
    found: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    map_tensors(note, batch)
    return found


def stored_values(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the plain tensors that a tensor consists of: indices and values of a sparse one, parts of a nested one."""
    if tensor.is_nested:
        return list(tensor.unbind())
    if tensor.layout is torch.sparse_coo:
        whole = tensor.coalesce()
        return [whole.indices(), whole.values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return [tensor]


def same_values(batch: Batch, other: Batch) -> bool:
    """Whether two batches hold the same numbers, sparse and nested tensors too, on whatever devices; NaN equals NaN."""
    pairs = zip(tensors_of(batch), tensors_of(other), strict=False)
    return all(_equal(a, b) for one, two in pairs for a, b in _stored_pairs(one, two))


def _stored_pairs(tensor: torch.Tensor, other: torch.Tensor) -> Iterator[tuple[torch.Tensor | None, torch.Tensor]]:
    if tensor.layout is not other.layout or tensor.is_nested is not other.is_nested:
        yield None, other
        return
    yield from zip_longest(stored_values(tensor), stored_values(other))


def _equal(tensor: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if tensor is None or other is None or tensor.shape != other.shape:
        return False
    one, two = tensor.cpu(), other.cpu()
    return torch.equal(one, two) or bool(((one == two) | ((one != one) & (two != two))).all())


def non_finite_in(batch: Batch) -> str | None:
    """Say which tensor of a batch holds NaN or infinity, and how many; None where all numbers are finite."""
    for place, tensor in enumerate(tensors_of(batch), start=1):
        parts = [part for part in stored_values(tensor) if part.is_floating_point() or part.is_complex()]
        for name, test in (("NaN", torch.isnan), ("inf", torch.isinf)):
            number = sum(int(test(part).sum()) for part in parts)
            if number:
                shape = "x".join(map(str, tensor.shape))
                return f"{number} {name} in its tensor {place} ({shape} {str(tensor.dtype).removeprefix('torch.')})"
    return None


def move_batch(batch: Batch, device: torch.device) -> Batch:
    """Return the batch on `device`; a tensor that is already there is not copied."""

    def move(tensor: torch.Tensor) -> torch.Tensor:
        there = tensor.device.type == device.type and device.index in (None, tensor.device.index)
        return tensor if there else tensor.to(device, non_blocking=True)

    return map_tensors(move, batch)


def count_samples(batch: Batch) -> int:
    """Return the first dimension of the first tensor in the batch.

    Raises:
        TaskError: there is no tensor with a dimension in it.
    """
    for tensor in tensors_of(batch):
        if tensor.ndim > 0:
            return int(tensor.shape[0])
    raise TaskError(
        f"a batch of type {type(batch).__name__} holds no tensor with a batch dimension;"
        " give the task num_samples=function(batch)"
    )


def cut_batch(batch: Batch, *, size: int, num_samples: Callable[[Batch], int] | None = None) -> Batch:
    """Return the first `size` samples: of every tensor whose first dimension is the number of samples.

    A batch with sparse or nested tensors, such as a graph, stays whole.
    """
    current = (num_samples or count_samples)(batch)
    is_whole = any(tensor.is_nested or tensor.layout is not torch.strided for tensor in tensors_of(batch))
    if current <= size or is_whole:
        return batch
    return map_tensors(lambda tensor: tensor[:size] if tensor.ndim and tensor.shape[0] == current else tensor, batch)


def open_batches(batches: Batches, *, name: str) -> Iterator[Batch]:
    """Return a fresh iterator over a list, a loader or a function that returns either.

    Raises:
        TaskError: `batches` is none of these; `name` says which ones they are.
    """
    opened = batches() if callable(batches) else batches
    if not isinstance(opened, Iterable):
        what = "returned" if callable(batches) else "is"
        raise TaskError(f"{name} {what} {type(opened).__name__}; batches in a list or another iterable are needed")
    return iter(opened)


def describe_loader(batches: Any) -> str:
    """Return what is known of a loader that gave nothing, such as " (3 samples, batch size 8, drop_last)"."""
    if isinstance(batches, DataLoader):
        size = len(batches.dataset) if isinstance(batches.dataset, Sized) else "?"
        dropped = ", drop_last" if batches.drop_last else ""
        return f" ({size} samples, batch size {batches.batch_size}{dropped})"
    return " (an empty list)" if isinstance(batches, list | tuple) else ""


def longest_batch(batches: Batches, *, max_batches: int) -> Batch:
    """Return the batch with the most numbers among a list's, or among the first `max_batches` of a loader's.

    Where lengths vary it is the longest batch that needs the most memory.
    """
    opened = batches() if callable(batches) else batches
    drawn = open_batches(opened, name="train_batches")
    return max(drawn if isinstance(opened, list | tuple) else itertools.islice(drawn, max_batches), key=_num_numbers)


def _num_numbers(batch: Batch) -> int:
    return sum(tensor.numel() for tensor in tensors_of(batch))


class BatchStream:
    """Training batches without end: restarted where they end, with a batch of one sample left out beside larger ones.

    Args:
        batches: what the task gives.
        num_samples: counts the samples of one batch.
        num_needed: how many will be asked for, for the message when a one-shot iterator runs out.
        on_note: called once with a sentence about what was left out.

    Raises (from `next`):
        TaskError: there are no batches, or a one-shot iterator gave too few.
    """

    def __init__(
        self,
        batches: Batches,
        *,
        num_samples: Callable[[Batch], int] | None = None,
        num_needed: int = 0,
        on_note: Callable[[str], None] | None = None,
    ) -> None:
        self._batches = batches
        self._num_samples = num_samples or count_samples
        self._num_needed = num_needed
        self._on_note = on_note
        self._num_given = 0
        self._num_opened = 0
        self._largest = 0
        self._iterator: Iterator[Batch] = iter(())
        self._ahead: list[Batch] = []

    def __iter__(self) -> BatchStream:
        return self

    def __next__(self) -> Batch:
        while True:
            batch = self._ahead.pop() if self._ahead else self._next_raw()
            size = self._num_samples(batch)
            self._largest = max(self._largest, size)
            if size == 1 and not self._num_given:
                self._look_ahead()
            if size > 1 or self._largest == 1:
                self._num_given += 1
                return batch
            self._note("a training batch of one sample was left out: normalisation needs at least two")

    def _look_ahead(self) -> None:
        """Tell a first batch of one sample from data that has no larger ones, by the batch after it."""
        with contextlib.suppress(TaskError):
            self._ahead.append(self._next_raw())
            self._largest = max(self._largest, self._num_samples(self._ahead[-1]))

    def _next_raw(self) -> Batch:
        for _ in range(2):
            try:
                return next(self._iterator)
            except StopIteration:
                if self._num_opened and isinstance(self._batches, OneShot):
                    break
                self._iterator = open_batches(self._batches, name="train_batches")
                self._num_opened += 1
        raise self._too_few()

    def _too_few(self) -> TaskError:
        if self._num_given == 0:
            return TaskError("there are 0 training batches: no data, or fewer samples than one batch with drop_last")
        of = f" of {self._num_needed}" if self._num_needed else ""
        return TaskError(
            f"the training batches are a one-shot iterator that gave only {self._num_given}{of} batches;"
            " give a list, a loader or a function that returns a fresh iterable"
        )

    def _note(self, text: str) -> None:
        if self._on_note is not None:
            self._on_note(text)
            self._on_note = None
