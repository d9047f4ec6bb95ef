"""One training of the digits for every framework: data, network, policies, and the plain loop it is compared with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import autoprec
from autoprec import Policy
from autoprec.probes.dtypes import DtypeLog, watch_dtypes
from autoprec.training import TrainingStep

NUM_STEPS = 110
LR = 3e-3
CLIP = 0.5
"""Low enough that the first steps of every training here are clipped."""
RULES = {"stem": "fp16", "norm": "fp32", "blocks": "autocast", "head": "bf16"}
POLICY = Policy(
    default="autocast",
    dtype="fp16",
    modules=RULES,
    grad_scaler={"init_scale": 2.0**14, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 20},
    optimizer={"eps": 1e-6, "amsgrad": True},
)
COMPUTED = {
    "stem": {torch.float16},
    "norm": {torch.float32},
    "blocks.0": {torch.float16},
    "blocks.2": {torch.float16},
    "head": {torch.bfloat16},
}
"""The dtypes that the operators of each unit compute on under `POLICY`."""
BF16 = Policy(default="bf16", modules={"norm": "fp32", "head": "fp32"})
FP32_POLICY = Policy(default="fp32")


class Network(nn.Module):
    """A stem in half, a norm, two layers under autocast and a head: a unit of each precision."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 8, 3, padding=1)
        self.norm = nn.LayerNorm((8, 8, 8))
        self.blocks = nn.Sequential(nn.Linear(512, 32), nn.ReLU(), nn.Linear(32, 32))
        self.head = nn.Linear(32, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.norm(self.stem(images)))
        return self.head(torch.relu(self.blocks(hidden.flatten(1))))


def network(seed: int = 0) -> Network:
    torch.manual_seed(seed)
    return Network()


def digits() -> TensorDataset:
    """The first 880 digits, (1, 8, 8) in [-1, 1], and their labels."""
    data = load_digits()
    images = torch.from_numpy(data.images[:880]).float().unsqueeze(1) / 8 - 1
    return TensorDataset(images, torch.from_numpy(data.target[:880]))


def loader(batch_size: int = 16) -> DataLoader[tuple[torch.Tensor, ...]]:
    """Batches in the data's own order: 55 of 16."""
    return DataLoader(digits(), batch_size=batch_size, shuffle=False)


def micro_batches(count: int, *, batch_size: int = 16) -> Iterator[Sequence[torch.Tensor]]:
    """The first `count` batches of epoch after epoch."""
    while True:
        for batch in loader(batch_size):
            if count == 0:
                return
            count -= 1
            yield batch


def train_plainly(
    policy: Policy,
    *,
    num_steps: int = NUM_STEPS,
    accumulation_steps: int = 1,
    clip: float | None = CLIP,
    batch_size: int = 16,
) -> tuple[Network, list[float]]:
    """Train in autoprec's own loop; return the network, bare again, and the loss of each micro-batch."""
    model = autoprec.apply_policy(network(), policy)
    optimizer = autoprec.build_optimizer(policy, torch.optim.Adam, model.parameters(), lr=LR)
    step = TrainingStep(
        optimizer,
        grad_scaler=autoprec.build_grad_scaler(policy, device="cpu"),
        accumulation_steps=accumulation_steps,
        max_grad_norm=clip,
    )
    losses = []
    with autoprec.emulate():
        for images, labels in micro_batches(num_steps * accumulation_steps, batch_size=batch_size):
            loss = F.cross_entropy(model(images), labels)
            step(loss)
            losses.append(float(loss.detach()))
    return autoprec.remove_policy(model), losses


def train_in_halves(policy: Policy, *, clip: float | None = CLIP) -> list[float]:
    """Train as two processes do: the gradient is the mean over the halves of each batch. Return the loss of each."""
    _, losses = train_plainly(policy, accumulation_steps=2, batch_size=8, clip=clip)
    return [(first + second) / 2 for first, second in zip(losses[::2], losses[1::2], strict=True)]


def train_share(model: nn.Module, step: TrainingStep, *, rank: int, first: int, last: int) -> list[float]:
    """Take the steps from `first` to before `last` on one of two processes' half of each batch.

    Return the loss of each whole batch.
    """
    losses = []
    for number, (images, labels) in enumerate(micro_batches(last)):
        if number >= first:
            own = slice(rank * 8, rank * 8 + 8)
            loss = F.cross_entropy(model(images[own]), labels[own])
            step(loss)
            mean = loss.detach().clone()
            torch.distributed.all_reduce(mean)
            losses.append(float(mean) / 2)
    return losses


def assert_same_weights(one: nn.Module, other: nn.Module) -> None:
    for (name, left), (_, right) in zip(one.named_parameters(), other.named_parameters(), strict=True):
        assert torch.equal(left, right), name


@contextmanager
def watching(model: nn.Module) -> Iterator[dict[str, set[torch.dtype]]]:
    """Fill the dict with what each unit of `COMPUTED` computed in."""
    found: dict[str, set[torch.dtype]] = {}
    with watch_dtypes(model) as log:
        yield found
    found.update(_computed(log))


def _computed(log: DtypeLog) -> dict[str, set[torch.dtype]]:
    return {name: set(log[name].computed) for name in COMPUTED}
