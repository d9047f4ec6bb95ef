"""A batch of another size: samples and pixels repeated, under fake tensors without allocating."""

from __future__ import annotations

from typing import Any

import torch

from autoprec.tasks.batches import count_samples, map_tensors

__all__ = ["resize_batch"]


def resize_batch(batch: Any, *, batch_size: int | None = None, image_size: int | None = None) -> Any:
    """Return a batch of another size by repeating samples and pixels; None leaves a size as it is.

    The first dimension changes where it equals the batch's own size; the last two of floating tensors with four
    dimensions become `image_size`. The memory format is kept. Under fake tensors nothing is allocated.
    """
    if batch_size is None and image_size is None:
        return batch
    current = count_samples(batch)

    def resize(tensor: torch.Tensor) -> torch.Tensor:
        changed = tensor
        if image_size is not None and tensor.dim() == 4 and tensor.is_floating_point():
            for dim in (2, 3):
                changed = _repeat_to(changed, dim, image_size)
        if batch_size is not None and tensor.dim() > 0 and tensor.shape[0] == current:
            changed = _repeat_to(changed, 0, batch_size)
        return changed if changed is tensor else _with_format_of(tensor, changed)

    return map_tensors(resize, batch)


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
