"""Batches of data held in memory: an epoch in random order for training, every sample once in order for evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from autoprec.errors import TaskError, UsageError
from autoprec.tasks.protocol import Batch

__all__ = ["EpochBatches", "check_batch_size", "split_indices"]

HELD_OUT_SHARE = 0.2


@dataclass(frozen=True, slots=True)
class EpochBatches:
    """One epoch each time it is called or gone through; the last batch may be smaller.

    Attributes:
        collate: makes the batch of some samples, given as a 1-D tensor of their indices.
        num_samples: in the data.
        batch_size: samples in a batch.
        shuffle: take an order from the global random state; else the data's own.
    """

    collate: Callable[[torch.Tensor], Batch]
    num_samples: int
    batch_size: int
    shuffle: bool

    def __call__(self) -> Iterator[Batch]:
        order = torch.randperm(self.num_samples) if self.shuffle else torch.arange(self.num_samples)
        for indices in order.split(self.batch_size):  # type: ignore[no-untyped-call]
            yield self.collate(indices)

    def __iter__(self) -> Iterator[Batch]:
        return self()

    def __len__(self) -> int:
        """Return the number of batches in an epoch."""
        return -(-self.num_samples // self.batch_size)

    def first(self, batch_size: int) -> Batch:
        """Return a batch of the first samples; data with fewer of them is repeated."""
        return self.collate(torch.arange(batch_size) % self.num_samples)


def check_batch_size(batch_size: int, *, data: str, num_train: int, num_held_out: int, noun: str = "samples") -> None:
    """Refuse a batch that the data cannot fill; `noun` is what the data consists of.

    Raises:
        UsageError: below 1. TaskError: no samples in one of the splits, or fewer for training than one batch.
    """
    if batch_size < 1:
        raise UsageError(f"batch_size is {batch_size}; at least 1")
    if num_train == 0 or num_held_out == 0:
        raise TaskError(
            f"data {data!r} has {num_train} training and {num_held_out} held-out {noun}: 0 batches of {batch_size};"
            " at least one of each is needed"
        )
    if batch_size > num_train:
        raise TaskError(f"batch_size is {batch_size}: larger than the {num_train} training {noun} of {data!r}")


def split_indices(num_samples: int, *, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the indices to train on and the fifth that is held out, by the seed alone."""
    order = torch.randperm(num_samples, generator=torch.Generator().manual_seed(seed))
    num_held_out = round(num_samples * HELD_OUT_SHARE)
    return order[num_held_out:], order[:num_held_out]
