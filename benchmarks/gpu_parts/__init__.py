"""The parts of benchmarks/gpu.py: each measures one thing, prints its table and returns what goes into the JSON."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from autoprec import Policy, emulate

__all__ = ["CPU_KIND", "Context", "Part"]

CPU_KIND = "measured on a CPU, FP16 emulated: no figure of a GPU"


@dataclass
class Context:
    """What every part is told. `deadline` is the `time.monotonic()` at which the run has to be over."""

    device: torch.device
    quick: bool
    deadline: float
    policies: Mapping[str, Policy]
    models: list[str]
    rounds: int
    folder: Path
    results: dict[str, Any] = field(default_factory=dict)

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def kind(self) -> str:
        return "measured" if self.is_cuda else CPU_KIND

    @property
    def seconds_left(self) -> float:
        return self.deadline - time.monotonic()

    @contextlib.contextmanager
    def arithmetic(self) -> Iterator[None]:
        """FP16 as it is on CUDA, emulated on a CPU."""
        with contextlib.nullcontext() if self.is_cuda else emulate():
            yield

    def synchronize(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize(self.device)


@dataclass(frozen=True)
class Part:
    """One part: `seconds` is what it takes on an H200-like card, `minimum` below which it is not begun."""

    name: str
    title: str
    run: Callable[[Context], Any]
    seconds: float
    minimum: float
