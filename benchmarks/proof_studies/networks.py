"""Small networks on scikit-learn's digits, and units that FP16 harms in three ways."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

from autoprec.tasks import TargetShape, Task

__all__ = ["BATCH", "FaintGradient", "digits_task"]

WIDTH = 24
BATCH = 32
TARGET_BATCH = 4096


@functools.cache
def digits(seed: int = 0) -> tuple[list[torch.Tensor], list[Any]]:
    """Return 1,437 training images of 64 pixels with their labels, and one held-out batch of 360."""
    data = load_digits()
    pixels = torch.tensor(data.data, dtype=torch.float32).div(16).sub(0.3).div(0.375)
    labels = torch.tensor(data.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    held_out, train = order[:360], order[360:]
    return [pixels[train], labels[train]], [(pixels[held_out], labels[held_out])]


def batches_of(train: list[torch.Tensor]) -> Callable[[], Iterator[Any]]:
    def batches() -> Iterator[Any]:
        for indices in torch.randperm(len(train[1])).split(BATCH):
            if len(indices) == BATCH:
                yield train[0][indices], train[1][indices]

    return batches


def cross_entropy(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def share_correct(model: nn.Module, batch: Any) -> torch.Tensor:
    return (model(batch[0]).argmax(1) == batch[1]).float().mean()


class LoudLinear(nn.Linear):
    """Gives outputs of about 1e5, which the norm behind it brings back: FP16 ends at 65504."""

    def __init__(self, width_in: int, width_out: int) -> None:
        super().__init__(width_in, width_out)
        with torch.no_grad():
            self.weight.mul_(2e5)


class FaintGradient(torch.autograd.Function):
    """The identity, whose gradient passes through values too small for FP16 even under the largest loss scale."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 1e-7 * 1e-7 * 1e7 * 1e7


class FaintLinear(nn.Linear):
    """A bottleneck whose gradients vanish in FP16: it and all before it are left as they were at the start."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = FaintGradient.apply(super().forward(x))
        return y


class PoisonedLinear(nn.Linear):
    """A layer, a cube and a batch norm in one unit: rare outliers overflow in FP16 and stay in the running statistics.

    About one batch in ten holds such an outlier; the loss stays finite.
    """

    def __init__(self, width_in: int, width_out: int) -> None:
        super().__init__(width_in, width_out)
        self.register_buffer("running_mean", torch.zeros(width_out))
        self.register_buffer("running_var", torch.ones(width_out))
        with torch.no_grad():
            self.weight.mul_(OUTLIERS[width_in])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return F.batch_norm(y * y * y, self.running_mean, self.running_var, training=self.training)


OUTLIERS = {64: 22.0, WIDTH: 29.0}


class Block(nn.Module):
    """A layer, its norm and an activation; what harms FP16 stands in the layer's place."""

    def __init__(self, width_in: int, width_out: int, kind: str) -> None:
        super().__init__()
        width = 4 if kind == "vanish" else width_out
        made = {"plain": nn.Linear, "overflow": LoudLinear, "vanish": FaintLinear, "poison": PoisonedLinear}[kind]
        self.unit = made(width_in, width)
        self.norm = nn.LayerNorm(width)
        self.wide = nn.Linear(width, width_out) if kind == "vanish" else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(self.wide(self.norm(self.unit(x))))


class Network(nn.Module):
    def __init__(self, kinds: list[str]) -> None:
        super().__init__()
        widths = [64, *[WIDTH] * len(kinds)]
        self.blocks = nn.Sequential(*[Block(widths[i], widths[i + 1], kind) for i, kind in enumerate(kinds)])
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(self.blocks(x))
        return y


def digits_task(name: str, kinds: list[str], *, lr: float = 0.1) -> Task:
    train, held_out = digits()
    return Task(
        name=name,
        model=lambda: Network(kinds),
        train_batches=batches_of(train),
        eval_batches=held_out,
        loss=cross_entropy,
        metric=share_correct,
        optimizer=torch.optim.SGD,
        optimizer_settings={"lr": lr, "momentum": 0.9},
        target=TargetShape(
            make_batch=lambda: (torch.zeros(TARGET_BATCH, 64), torch.zeros(TARGET_BATCH, dtype=torch.long)),
            batch_size=TARGET_BATCH,
        ),
        settings={"kinds": kinds},
    )
