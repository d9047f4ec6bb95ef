"""torch.compile in a trial, where the task asks for it; and what a reader must know of options that do not act here."""

from __future__ import annotations

from typing import cast

import torch
from torch import nn

from autoprec.errors import UsageError, did_you_mean
from autoprec.tasks.protocol import Task

__all__ = ["check_compile", "compiled", "forget_compiled", "option_notes"]

NEED_NO_COMPILER = ("eager", "aot_eager")
"""Backends of torch.compile that trace the model and run PyTorch's own kernels."""


def compiled(model: nn.Module, task: Task) -> nn.Module:
    """Return the model to call in training: compiled where the task asks for it. Apply the policy first."""
    if task.compile is None:
        return model
    return cast(nn.Module, torch.compile(model, backend=task.compile))


def forget_compiled(task: Task) -> None:
    """Drop what torch.compile keeps of the models of this process, so that none stays alive."""
    if task.compile is not None:
        torch.compiler.reset()


def check_compile(task: Task, device: torch.device) -> None:
    """Compile a small function as the trials would compile the model.

    Raises:
        UsageError: no such backend, or one that cannot compile for this device here.
    """
    if task.compile is None:
        return
    backends = torch.compiler.list_backends(exclude_tags=None)
    if task.compile not in backends:
        raise UsageError(
            f"compile backend {task.compile!r}; allowed: {', '.join(backends)}{did_you_mean(task.compile, backends)}"
        )
    weight = torch.ones(2, 2, device=device, requires_grad=True)
    try:
        torch.compile(lambda x: (x @ x).relu().sum(), backend=task.compile)(weight).backward()
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        reason = f"{type(error).__name__}: {' '.join(lines[:2])[:200]}" if lines else type(error).__name__
        raise UsageError(
            f"compile backend {task.compile!r} cannot compile for {device.type} here ({reason}); "
            f"{' and '.join(NEED_NO_COMPILER)} need no compiler"
        ) from None
    finally:
        forget_compiled(task)


def option_notes(task: Task, *, device: torch.device, emulates: bool) -> list[str]:
    """Return a sentence for each option whose effect these numbers do not hold."""
    notes: list[str] = []
    if device.type == "cuda":
        return notes
    if task.compile is not None:
        notes.append(
            f"torch.compile ({task.compile}): "
            + ("an emulated trial runs eagerly, and " if emulates else "")
            + "memory and throughput are those of the eager step"
        )
    if task.tf32:
        notes.append("TF32 is not emulated: FP32 units computed in full FP32 here; the predicted throughput has it")
    return notes
