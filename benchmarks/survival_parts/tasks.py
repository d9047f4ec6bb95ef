"""The tasks of `survival.py`: a cheap network, and the same with a fault in it. Worker processes build them by name."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from autoprec.tasks import Task


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(self.linear(self.norm(x)))


class Length(nn.Module):
    """About |x| by way of squares: beyond FP16's largest value, and fine where autocast takes the power in FP32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ((self.weight * x * 1e3).pow(2) + 1.0).sqrt() / 1e3


class Network(nn.Module):
    """Three blocks between a stem and a head; "overflow" puts a unit among them that cannot be in FP16."""

    def __init__(self, fault: str = "none") -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32))
        self.first, self.second, self.third = Block(32), Block(32), Block(32)
        self.length = Length(32) if fault == "overflow" else nn.Identity()
        self.head = nn.Linear(32, 2)
        self.fault = fault

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.third(self.length(self.second(self.first(self.stem(x)))))
        if self.fault != "overflow" and (h.dtype == torch.bfloat16 or self.fault.startswith("always:")):
            h = _FAULTS[self.fault.removeprefix("always:")](self, h)
        return self.head(h)


def batches(seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(8, 16, 8, generator=generator)
    return [(x, (x.sum(1) > 0).long()) for x in inputs]


def cross_entropy(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def share_correct(model: nn.Module, batch: Any) -> torch.Tensor:
    return (model(batch[0]).argmax(1) == batch[1]).float().mean()


def task(fault: str = "none") -> Task:
    return Task(
        name="survival",
        model=lambda: Network(fault),
        train_batches=batches(0),
        eval_batches=batches(1),
        loss=cross_entropy,
        metric=share_correct,
        settings={"fault": fault},
    )


def overflowing() -> Task:
    """A task one of whose units overflows in FP16, and nothing else does."""
    return task("overflow")


def _raise(error: BaseException) -> Callable[[Network, torch.Tensor], torch.Tensor]:
    def fault(model: Network, h: torch.Tensor) -> torch.Tensor:
        raise error

    return fault


def _do(act: Callable[[], Any]) -> Callable[[Network, torch.Tensor], torch.Tensor]:
    def fault(model: Network, h: torch.Tensor) -> torch.Tensor:
        act()
        return h

    return fault


class Unpicklable(Exception):  # noqa: N818
    def __init__(self) -> None:
        super().__init__("a lambda inside")
        self.function = lambda: None


class Untold(Exception):  # noqa: N818
    """An exception whose own text cannot be had."""

    def __str__(self) -> str:
        raise ValueError("no text")


def _spin() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        time.sleep(0.01)


def _spin_with_the_lock() -> None:
    """Hang in C without ever letting another thread of Python run."""
    ctypes.PyDLL(None).sleep(600)


def _exhaust() -> None:
    torch.empty(2**58, dtype=torch.float32)


def _fill_buffer(model: Network, h: torch.Tensor) -> torch.Tensor:
    model.stem[1].running_mean.data.fill_(float("inf"))  # past autograd, which has saved it for the backward pass
    return h


_FAULTS: dict[str, Callable[[Network, torch.Tensor], torch.Tensor]] = {
    "none": _do(lambda: None),
    "os.abort": _do(os.abort),
    "segfault": _do(lambda: ctypes.string_at(0)),
    "os._exit(3)": _do(lambda: os._exit(3)),
    "sys.exit(3)": _do(lambda: sys.exit(3)),
    "kill -9": _do(lambda: os.kill(os.getpid(), signal.SIGKILL)),
    "spin": _do(_spin),
    "spin with the lock": _do(_spin_with_the_lock),
    "unpicklable": _raise(Unpicklable()),
    "untold": _raise(Untold()),
    "torch.OutOfMemoryError": _raise(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")),
    "MemoryError": _raise(MemoryError()),
    "a tensor too large": _do(_exhaust),
    "cuBLAS": _raise(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")),
    "cuDNN": _raise(RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED")),
    "HIP": _raise(RuntimeError("HIP out of memory. Tried to allocate 2.00 GiB")),
    "MPS": _raise(RuntimeError("MPS backend out of memory (MPS allocated: 9.0 GB)")),
    "shared memory": _raise(
        RuntimeError("Bus error. It is possible that dataloader's workers are out of shared memory")
    ),
    "fork": _raise(OSError(12, "Cannot allocate memory")),
    "std::bad_alloc": _raise(RuntimeError("std::bad_alloc")),
    "device-side assert": _raise(RuntimeError("CUDA error: device-side assert triggered")),
    "not implemented": _raise(RuntimeError("\"fft\" not implemented for 'BFloat16'")),
    "a wrong key": _raise(KeyError("labels")),
    "NaN": lambda model, h: h * float("nan"),
    "a buffer": _fill_buffer,
}
