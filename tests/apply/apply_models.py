"""Small models of many kinds, with a policy for each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from autoprec import Policy


class Calls(nn.Module):
    """A module around a function, with submodules as keywords."""

    def __init__(self, function: Any, **parts: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


class Residual(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.act = nn.ReLU(inplace=True)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.act(self.up(self.norm(x))))


class Net(nn.Module):
    """Blocks, a norm with statistics, a frozen layer, a buffer that is read, a weight read by a functional."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.stem = nn.Linear(width, width)
        self.blocks = nn.ModuleList([Residual(width), Residual(width)])
        self.norm = nn.BatchNorm1d(width)
        self.read = nn.Linear(width, width)
        self.head = nn.Linear(width, 4)
        self.head.bias.requires_grad_(False)
        self.register_buffer("shift", torch.linspace(-1, 1, width))

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        x = self.stem(x) + self.shift
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        x = F.linear(x, self.read.weight, self.read.bias)
        return self.head.forward(x) * scale


class Tied(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.same = self.first
        self.last = nn.Linear(width, width)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.same(torch.relu(self.first(x))))


class Convolutional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Conv2d(4, 4, 3, padding=1)
        )
        self.norm = nn.GroupNorm(2, 4)
        self.head = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.body(x)).mean((2, 3)))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(8, 8, batch_first=True)
        self.cell = nn.LSTMCell(8, 8)
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, _ = self.gru(x.unsqueeze(1))
        hidden, _ = self.cell(x[:, -1])
        return self.head(hidden)


class Attentive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x.view(-1, 2, 8))
        x, _ = self.attention(x, x, x, need_weights=False)
        return self.head(x).flatten(0, 1)


@dataclass(frozen=True)
class Example:
    make: Callable[[], nn.Module]
    policy: Policy
    inputs: Callable[[], torch.Tensor] = lambda: torch.randn(6, 8)

    def model(self) -> Any:
        torch.manual_seed(0)
        return self.make()

    def batch(self) -> torch.Tensor:
        torch.manual_seed(1)
        return self.inputs()


MIXED = {"blocks.0": "fp16", "blocks.1.up": "fp32", "norm": "bf16"}

EXAMPLES: dict[str, Example] = {
    "all fp32": Example(Net, Policy(default="fp32")),
    "all autocast": Example(Net, Policy(default="autocast", dtype="bf16")),
    "all half": Example(Net, Policy(default="bf16")),
    "mixed": Example(Net, Policy(default="autocast", dtype="bf16", modules=MIXED)),
    "mixed in half": Example(Net, Policy(default="fp16", modules={"blocks.0.down": "fp32", "head": "bf16"})),
    "sequence": Example(
        lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)),
        Policy(default="fp32", modules={"0": "fp16", "1": "fp16", "3": "bf16", "4": "autocast"}, dtype="bf16"),
    ),
    "tied": Example(Tied, Policy(default="fp32", modules={"first": "bf16", "last": "bf16"})),
    "convolutions": Example(
        Convolutional,
        Policy(default="bf16", modules={"body.1": "fp32", "norm": "autocast"}, dtype="bf16"),
        lambda: torch.randn(6, 3, 8, 8),
    ),
    "recurrent": Example(Recurrent, Policy(default="fp32", modules={"gru": "bf16", "cell": "fp16"})),
    "attention": Example(Attentive, Policy(default="bf16", modules={"layer.norm1": "fp32", "head": "fp32"})),
    "attention, autocast": Example(Attentive, Policy(default="autocast", dtype="bf16")),
}
