"""The tensors of a batch: map over containers without changing their class, and rescale to another batch or image."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from autoprec.errors import TaskError

__all__ = ["map_tensors", "tensors_of", "num_samples_of", "resize_batch"]


def map_tensors(value: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return `value` with each tensor replaced by `function(tensor)`; mappings, sequences, named tuples and dataclasses
    keep their class, anything else comes through as it is."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, Mapping):
        items = {key: map_tensors(item, function) for key, item in value.items()}
        return items if type(value) is dict else _same_mapping(value, items)
    if isinstance(value, (list, tuple)):
        mapped = [map_tensors(item, function) for item in value]
        return type(value)(*mapped) if hasattr(value, "_fields") else type(value)(mapped)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changed = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(changed, field.name, map_tensors(getattr(value, field.name), function))
        return changed
    return value


def _same_mapping(value: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    changed = copy.copy(value)
    for key, item in items.items():
        changed[key] = item  # type: ignore[index]
    return changed


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a batch or of a module's output, depth first."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_of(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_of(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_of(getattr(value, field.name))


def num_samples_of(batch: Any) -> int:
    """Return the first dimension of the batch's first tensor that has one.

    Raises:
        TaskError: the batch holds no such tensor.
    """
    for tensor in tensors_of(batch):
        if tensor.dim() > 0:
            return int(tensor.shape[0])
    raise TaskError(f"batch: found {type(batch).__name__} without a tensor that has a dimension; give num_samples")


def resize_batch(batch: Any, *, batch_size: int | None = None, image_size: int | None = None) -> Any:
    """Return a batch of another size by repeating samples and pixels; None leaves a size as it is.

    The first dimension changes where it equals the batch's own size; the last two of floating tensors with four
    dimensions become `image_size`. The memory format is kept. Under fake tensors nothing is allocated.
    """
    if batch_size is None and image_size is None:
        return batch
    current = num_samples_of(batch)

    def resize(tensor: torch.Tensor) -> torch.Tensor:
        changed = tensor
        if image_size is not None and tensor.dim() == 4 and tensor.is_floating_point():
            for dim in (2, 3):
                changed = _repeat_to(changed, dim, image_size)
        if batch_size is not None and tensor.dim() > 0 and tensor.shape[0] == current:
            changed = _repeat_to(changed, 0, batch_size)
        return changed if changed is tensor else _with_format_of(tensor, changed)

    return map_tensors(batch, resize)


def _repeat_to(tensor: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    if tensor.shape[dim] == size:
        return tensor
    index = torch.arange(size, device=tensor.device) % tensor.shape[dim]
    return tensor.index_select(dim, index)


def _with_format_of(original: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    channels_last = original.dim() == 4 and original.is_contiguous(memory_format=torch.channels_last)
    if channels_last and not original.is_contiguous():
        return tensor.contiguous(memory_format=torch.channels_last)
    return tensor.contiguous()
