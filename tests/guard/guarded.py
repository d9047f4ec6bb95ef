"""Small trainings for the guard: real digits, a policy in FP16, faults planted on purpose."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn

from autoprec import Policy, apply_policy, build_grad_scaler
from autoprec.guard import GuardRecord, TrainingGuard
from autoprec.policy import GradScalerSettings


class Net(nn.Module):
    """`body` overflows FP16 when its weights grow; the norm after it makes them fine in FP32."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(64, 32)
        self.body = nn.Linear(32, 32)
        self.norm = nn.BatchNorm1d(32)
        self.head = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.norm(self.body(torch.relu(self.stem(x))))))


POLICY = Policy(
    default="fp16",
    dtype="fp16",
    modules={"norm": "fp32", "head": "fp32"},
    grad_scaler=GradScalerSettings(init_scale=1024.0),
)


def digits(batch_size: int = 64) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield batches of 8x8 digits, (batch, 64) in 0 to 1 with their labels, for ever."""
    found = load_digits()
    images = torch.tensor(found.data, dtype=torch.float32) / 16
    labels = torch.tensor(found.target)
    generator = torch.Generator().manual_seed(0)
    while True:
        for rows in torch.randperm(len(images), generator=generator).split(batch_size):
            yield images[rows], labels[rows]


def train(
    model: nn.Module,
    num_steps: int,
    *,
    policy: Policy = POLICY,
    at_step: Callable[[int, nn.Module], None] = lambda step, model: None,
    call: nn.Module | None = None,
    **settings: Any,
) -> tuple[TrainingGuard, list[GuardRecord]]:
    """Train `model`, which has its policy already, under a guard; `at_step` plants faults, `call` is what is called."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = build_grad_scaler(policy, device="cpu")
    records = []
    with TrainingGuard(model, optimizer=optimizer, grad_scaler=scaler, **settings) as guard:
        for step, (images, labels) in zip(range(1, num_steps + 1), digits(), strict=False):
            at_step(step, model)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy((call or model)(images), labels)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            records.append(guard.after_step(loss))
    return guard, records


def make(policy: Policy = POLICY, model: nn.Module | None = None) -> nn.Module:
    torch.manual_seed(0)
    return apply_policy(model if model is not None else Net(), policy)


def overflow_at(step: int) -> Callable[[int, nn.Module], None]:
    """Grow the weights of `body` at a step, for good: its output leaves FP16's range and not FP32's."""

    def plant(now: int, model: nn.Module) -> None:
        if now == step:
            with torch.no_grad():
                model.body.weight.mul_(1e6)

    return plant
