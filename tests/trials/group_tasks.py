"""Tasks for trials on several GPUs; each process of the group builds them anew."""

from __future__ import annotations

import torch
from small_tasks import cross_entropy, share_correct, small_task
from torch import nn

from autoprec.tasks import Task


def layered() -> nn.Module:
    """No BatchNorm, whose statistics would be those of one process's samples."""
    return nn.Sequential(nn.Linear(4, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 2))


def samples(size: int, *, seed: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(384, 4, generator=generator)
    return [(x, (x.sum(1) > 0).long()) for x in inputs.split(size)]


def group_task(size: int = 32) -> Task:
    """Return the same samples in batches of any size: a group of two takes half of what one process does."""
    return small_task(
        name="layered",
        model=layered,
        train_batches=samples(size),
        eval_batches=samples(64, seed=1),
        loss=cross_entropy,
        metric=share_correct,
    )
