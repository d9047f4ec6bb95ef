from __future__ import annotations

from typing import NamedTuple

import torch

from autoprec.estimates.batches import resize_batch


class Pair(NamedTuple):
    images: torch.Tensor
    labels: torch.Tensor


def test_resizing_repeats_samples_and_pixels_and_leaves_other_tensors() -> None:
    batch = Pair(torch.arange(2 * 3 * 4 * 4.0).reshape(2, 3, 4, 4), torch.tensor([7, 8]))
    weights = torch.ones(3)
    resized, same = resize_batch((batch, weights), batch_size=5, image_size=6)
    assert resized.images.shape == (5, 3, 6, 6)
    assert resized.labels.tolist() == [7, 8, 7, 8, 7]
    assert same is weights
    assert torch.equal(resized.images[2, :, :4, :4], batch.images[0])


def test_resizing_keeps_channels_last() -> None:
    images = torch.zeros(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    resized = resize_batch(images, batch_size=4, image_size=8)
    assert resized.is_contiguous(memory_format=torch.channels_last)
    assert not resized.is_contiguous()


def test_no_other_size_gives_the_batch_itself() -> None:
    batch = (torch.zeros(2, 3),)
    assert resize_batch(batch) is batch
