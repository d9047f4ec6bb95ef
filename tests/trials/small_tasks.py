"""Small tasks for the tests of trials; `build` is what a worker process calls."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from typing import Any

import torch
from left_modes import MODES
from torch import nn

from autoprec.tasks import Task
from autoprec.trials import Outcome


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
            name, _, argument = self.fault.removeprefix("always:").partition(":")
            _FAULTS[name](*([argument] if argument else []))
            if name == "keep":
                _KEPT.append(self)
        return y


_KEPT: list[nn.Module] = []


def _spin() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        time.sleep(0.01)


def _spin_with_the_lock() -> None:
    """Hang in C and let no other thread of Python run."""
    ctypes.PyDLL(None).sleep(600)


def _start_a_child(path: str) -> None:
    if not os.path.exists(path):
        process = subprocess.Popen(["sleep", "600"])
        with open(path, "w") as file:
            file.write(str(process.pid))
        process.returncode = 0  # nobody waits for it


def _abort() -> None:
    print("about to abort", flush=True)
    os.abort()


def _fork_once() -> None:
    """Go on twice, once in each process."""
    if not _KEPT:
        _KEPT.append(nn.Identity())
        os.fork()


def _start_a_session(path: str) -> None:
    """Start a child that no signal to this process's group reaches."""
    if not os.path.exists(path):
        process = subprocess.Popen(["sleep", "600"], start_new_session=True)
        with open(path, "w") as file:
            file.write(str(process.pid))
        process.returncode = 0


class _Unpicklable(Exception):  # noqa: N818
    def __init__(self) -> None:
        super().__init__("a lambda inside")
        self.function = lambda: None


def _raise_unpicklable() -> None:
    raise _Unpicklable


_FAULTS: dict[str, Any] = {
    "none": lambda: None,
    "keep": lambda: None,
    "slow": lambda: time.sleep(0.1),
    "child": _start_a_child,
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "hang": _spin,
    "hang with the lock": _spin_with_the_lock,
    "abort": _abort,
    "segfault": lambda: ctypes.string_at(0),
    "exit": lambda: os._exit(3),
    "device assert": lambda: torch.zeros(2, device="cuda")[torch.tensor([5], device="cuda")].sum().item(),
    "unpicklable": _raise_unpicklable,
    "mode": lambda name: MODES[name](),
    "fork": _fork_once,
    "session": _start_a_session,
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


def build_after_kills(path: str, num_kills: int) -> Task:
    """Build the task when as many processes as asked were killed while they did; `path` counts them."""
    with open(path, "a+") as counter:
        counter.seek(0)
        if len(counter.read()) < num_kills:
            counter.write("x")
            counter.flush()
            os.kill(os.getpid(), signal.SIGKILL)
    return small_task()


def comparable(outcome: Outcome) -> dict[str, Any]:
    """Return what two equal trials have in common: all but the times."""
    return outcome.model_dump(exclude={"wall_seconds", "step_seconds_here", "phase_seconds"})
