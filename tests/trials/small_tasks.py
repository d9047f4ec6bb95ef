"""Small tasks for the tests of trials; `build` is what a worker process calls."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch
from torch import nn

from autoprec.tasks import Task


def batches(seed: int, *, num_batches: int = 6, size: int = 8) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(num_batches, size, 4, generator=generator)
    return [(x, (x.sum(1) > 0).long()) for x in inputs]


def cross_entropy(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def share_correct(model: nn.Module, batch: Any) -> torch.Tensor:
    return (model(batch[0]).argmax(1) == batch[1]).float().mean()


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))


def small_task(**changes: Any) -> Task:
    settings: dict[str, Any] = {
        "name": "small",
        "model": network,
        "train_batches": batches(0),
        "eval_batches": batches(1),
        "loss": cross_entropy,
        "metric": share_correct,
    }
    return Task(**(settings | changes))


def critic_loss(nets: nn.Module, batch: Any) -> torch.Tensor:
    real, made = nets.critic(batch[0]), nets.critic(nets.maker(torch.randn(len(batch[0]), 2)).detach())  # type: ignore[operator]
    return nn.functional.softplus(-real).mean() + nn.functional.softplus(made).mean()


def maker_loss(nets: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.softplus(-nets.critic(nets.maker(torch.randn(len(batch[0]), 2)))).mean()  # type: ignore[operator]


class Adversaries(nn.Module):
    """A GAN: its parts are called by the losses, the whole never is."""

    def __init__(self) -> None:
        super().__init__()
        self.critic = nn.Sequential(nn.Linear(4, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
        self.maker = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 4))


def gan_task(**changes: Any) -> Task:
    def moments(nets: nn.Module, batch: Any) -> torch.Tensor:
        made = nets.maker(torch.randn(len(batch[0]), 2))  # type: ignore[operator]
        return -(made.mean(0) - batch[0].mean(0)).abs().mean() - (made.std(0) - batch[0].std(0)).abs().mean()

    settings: dict[str, Any] = {
        "name": "gan",
        "model": Adversaries,
        "losses": {"critic": critic_loss, "maker": maker_loss},
        "loss": lambda nets, batch: critic_loss(nets, batch) + maker_loss(nets, batch),
        "metric": moments,
        "metric_name": "negated distance of moments",
        "optimizer": torch.optim.Adam,
        "optimizer_settings": {"lr": 1e-3, "betas": (0.5, 0.9)},
    }
    return small_task(**(settings | changes))


class _Faulty(nn.Module):
    """A network whose forward does something bad in one half precision, and nothing else in FP32."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.inside = network()
        self.fault = fault

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.inside(x)
        if y.dtype == torch.bfloat16 or self.fault.startswith("always:"):
            _FAULTS[self.fault.removeprefix("always:")]()
        return y


def _spin() -> None:
    while True:
        time.sleep(0.01)


def _abort() -> None:
    print("about to abort", flush=True)
    os.abort()


class _Unpicklable(Exception):  # noqa: N818
    def __init__(self) -> None:
        super().__init__("a lambda inside")
        self.function = lambda: None


def _raise_unpicklable() -> None:
    raise _Unpicklable


_FAULTS = {
    "none": lambda: None,
    "hang": _spin,
    "abort": _abort,
    "segfault": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "exit": lambda: os._exit(3),
    "unpicklable": _raise_unpicklable,
}


def build(fault: str = "none") -> Task:
    return small_task(name=f"faulty-{fault}", model=lambda: _Faulty(fault))


def build_nothing() -> None:
    return None


def describe_task(task: Task, **arguments: Any) -> dict[str, Any]:
    """What a test lets a worker call: it returns the task's name and what it was given."""
    if arguments.get("fails"):
        raise ValueError("as asked")
    return {"name": task.name, **arguments}
