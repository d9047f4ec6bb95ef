"""A small task whose model fails in BF16 alone: it runs out of memory, or trips an assertion on the device."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from autoprec import Task

TOO_MANY = 1 << 50


def out_of_memory(x: torch.Tensor) -> None:
    if not x.is_cuda:
        raise torch.OutOfMemoryError("as if a GPU had run out of memory")
    torch.empty(TOO_MANY, device=x.device)


def device_assert(x: torch.Tensor) -> None:
    if not x.is_cuda:
        os.abort()
    F.embedding(torch.full((1,), 100, device=x.device), torch.ones(2, 2, device=x.device)).sum().item()


FAULTS = {"out of memory": out_of_memory, "device-side assert": device_assert}


class Faulty(nn.Module):
    def __init__(self, fault: str) -> None:
        super().__init__()
        self.inside = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 2))
        self.fault = fault

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inside(x)
        if y.dtype == torch.bfloat16:
            FAULTS[self.fault](y)
        return y


def batches(seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    inputs = torch.randn(8, 32, 64, generator=torch.Generator().manual_seed(seed))
    return [(x, (x.sum(1) > 0).long()) for x in inputs]


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def task(fault: str) -> Task:
    return Task(
        name="faulty", model=lambda: Faulty(fault), train_batches=batches(0), eval_batches=batches(1), loss=loss
    )
