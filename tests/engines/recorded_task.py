"""A tiny task that writes down where each of its trainings begins: the device that it sees, and its process.

It does so where the folder in which it runs has a file called `SECONDS`, which says how long a training is to take.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
from torch import nn

from autoprec import Task

RECORD = Path("record.txt")
SECONDS = Path("seconds.txt")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.ReLU()) for _ in range(3)])
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def build_model() -> nn.Module:
    """Build the network for a training, after a while."""
    if SECONDS.exists():
        with RECORD.open("a") as file:
            file.write(f"{os.environ.get('CUDA_VISIBLE_DEVICES', '')} {os.getpid()}\n")
        time.sleep(float(SECONDS.read_text()))
    return Net()


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def task() -> Task:
    generator = torch.Generator().manual_seed(0)
    batches = [
        (torch.randn(16, 8, generator=generator), torch.randint(3, (16,), generator=generator)) for _ in range(4)
    ]
    return Task(name="recorded", model=build_model, train_batches=batches, eval_batches=batches, loss=loss)


def broken() -> Task:
    raise RuntimeError("no data here")
