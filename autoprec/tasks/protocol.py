"""What is trained: a `Task` names every part of one training, with a sensible default for most of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from autoprec.errors import TaskError

__all__ = ["Batch", "Task", "TargetShape"]

Batch = Any
"""Whatever the task's own loss takes: a tensor, tuple, dict, named tuple or dataclass of tensors."""

Batches = Sequence[Batch] | Callable[[], Iterable[Batch]]
"""A list of ready batches, or a function that returns a fresh iterable of them each time it is called."""


@dataclass(frozen=True, slots=True)
class TargetShape:
    """The shape of the real run: memory and throughput are those of this shape. `make_batch` builds one batch of it."""

    make_batch: Callable[[], Batch]
    batch_size: int
    description: str = ""


@dataclass(frozen=True, kw_only=True)
class Task:
    """One training task.

    `Task(name="mine", model=build, train_batches=batches, eval_batches=held_out, loss=loss)` is a whole task.

    Attributes:
        name: shown and stored; no path.
        model: builds a fresh model; called for each trial with the seed set.
        train_batches: the training batches, restarted where they end.
        eval_batches: held-out batches, all of them used, each weighted by its number of samples.
        loss: `loss(model, batch)` -> scalar tensor; calls the model itself.
        metric: `metric(model, batch)` -> mean over the batch (float or tensor); None takes the held-out loss, negated.
        metric_name: what `accuracy` in the study means for this task.
        metric_direction: "maximize" or "minimize" (a metric to minimize is stored negated).
        optimizer: a class such as `torch.optim.AdamW`, or a function from parameters to an optimizer.
        optimizer_settings: keyword arguments of the class (lr, weight_decay ...).
        scheduler: `scheduler(optimizer, num_steps)` -> a scheduler stepped after each step that was taken.
        max_grad_norm: clip the norm of unscaled gradients; None does not clip.
        accumulation_steps: micro-batches to one optimizer step.
        num_samples: samples in a batch; None takes the first dimension of its first tensor.
        target: the shape of the real run; None takes the first training batch.
        settings: what else decides the numbers (data set, sizes ...): part of the study's fingerprint, JSON values.
    """

    name: str
    model: Callable[[], nn.Module]
    train_batches: Batches
    eval_batches: Batches
    loss: Callable[[nn.Module, Batch], torch.Tensor]
    metric: Callable[[nn.Module, Batch], torch.Tensor | float] | None = None
    metric_name: str = "accuracy"
    metric_direction: str = "maximize"
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW
    optimizer_settings: Mapping[str, Any] = field(default_factory=lambda: {"lr": 1e-3})
    scheduler: Callable[[torch.optim.Optimizer, int], Any] | None = None
    max_grad_norm: float | None = None
    accumulation_steps: int = 1
    num_samples: Callable[[Batch], int] | None = None
    target: TargetShape | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.metric_direction not in ("maximize", "minimize"):
            raise TaskError(
                f"task {self.name!r}: metric_direction is {self.metric_direction!r}; allowed: maximize, minimize"
            )
        if self.accumulation_steps < 1:
            raise TaskError(f"task {self.name!r}: accumulation_steps is {self.accumulation_steps}; at least 1")
