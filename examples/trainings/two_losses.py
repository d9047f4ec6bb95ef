"""Dictionaries in and out, two losses: which digit an image shows, and how much ink is on it.

autoprec search --task examples/trainings/two_losses.py:task
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import autoprec

Batch = dict[str, torch.Tensor]


class Digits:
    """Batches as dictionaries; an iterable without a length, its order drawn anew each epoch in training."""

    def __init__(self, indices: torch.Tensor, batch_size: int, *, shuffle: bool) -> None:
        data = load_digits()
        self.images = torch.from_numpy(data.images).float().flatten(1)[indices] / 16
        self.digits = torch.from_numpy(data.target)[indices]
        self.batch_size = batch_size
        self.shuffle = shuffle

    def __iter__(self) -> Iterator[Batch]:
        order = torch.randperm(len(self.digits)) if self.shuffle else torch.arange(len(self.digits))
        for picked in order.split(self.batch_size):
            images = self.images[picked]
            yield {"image": images, "digit": self.digits[picked], "ink": images.mean(1)}


class TwoHeads(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(64, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, width))
        self.digit = nn.Linear(width, 10)
        self.ink = nn.Linear(width, 1)

    def forward(self, batch: Batch) -> Batch:
        features = F.relu(self.trunk(batch["image"]))
        return {"digit": self.digit(features), "ink": self.ink(features).squeeze(1)}


def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    return combined(model(batch), batch)


def combined(outputs: Batch, batch: Batch) -> torch.Tensor:
    return F.cross_entropy(outputs["digit"], batch["digit"]) + 10 * F.mse_loss(outputs["ink"], batch["ink"])


def evaluate(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss and the share of right digits from one forward."""
    outputs = model(batch)
    return combined(outputs, batch), (outputs["digit"].argmax(1) == batch["digit"]).float().mean()


def task(width: int = 64, batch_size: int = 32) -> autoprec.Task:
    order = torch.randperm(1797, generator=torch.Generator().manual_seed(0))
    return autoprec.Task(
        name="two losses",
        model=lambda: TwoHeads(width),
        train_batches=Digits(order[:1440], batch_size, shuffle=True),
        eval_batches=Digits(order[1440:], batch_size, shuffle=False),
        loss=loss,
        evaluate=evaluate,
        optimizer_settings={"lr": 3e-3},
    )
