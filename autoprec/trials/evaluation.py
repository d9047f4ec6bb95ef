"""What a trained model is worth: BatchNorm statistics estimated anew, loss and metric over all held-out batches."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from autoprec.errors import TaskError
from autoprec.tasks.batches import count_samples, non_finite_in, open_batches
from autoprec.tasks.protocol import Batch, Task
from autoprec.trials.building import prepare_batch

__all__ = ["Evaluation", "estimate_batchnorm", "evaluate", "evaluating", "loss_and_metric"]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Means over all held-out samples; either may be non-finite. `metric` is larger where it is better."""

    loss: float
    metric: float
    num_samples: int


def estimate_batchnorm(model: nn.Module, task: Task, batches: Iterable[Batch]) -> int:
    """Estimate the running statistics anew as the plain mean over a few training batches, in place.

    After few steps the running averages still hold much of their starting values. Returns the number of layers.
    """
    layers = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.running_mean is not None]
    batches = iter(batches)
    first = next(batches, None) if layers else None
    if first is None:
        return 0
    momenta = [layer.momentum for layer in layers]
    modes = [(module, module.training) for module in model.modules()]
    for module, _ in modes:  # the loss may exist in training mode alone (detectors); what drops at random is off
        module.training = bool(module._modules) or isinstance(module, _BatchNorm)
    for layer in layers:
        layer.reset_running_stats()
        layer.momentum = None
    try:
        with torch.no_grad():
            for batch in itertools.chain([first], batches):
                task.loss(model, batch)
    finally:
        for layer, momentum in zip(layers, momenta, strict=True):
            layer.momentum = momentum
        for module, mode in modes:
            module.training = mode
    return len(layers)


def evaluate(model: nn.Module, task: Task, *, device: torch.device) -> Evaluation:
    """Return loss and metric over every held-out batch, each weighted by its number of samples.

    Raises:
        TaskError: there are no held-out batches, or the metric is not a number.
    """
    count = task.num_samples or count_samples
    losses, metrics, num_samples, num_batches = 0.0, 0.0, 0, 0
    with evaluating(model):
        for batch in open_batches(task.eval_batches, name="eval_batches"):
            size = count(batch)
            loss, metric = loss_and_metric(model, task, prepare_batch(task, batch, device))
            num_batches += 1
            if not math.isfinite(loss) and (found := non_finite_in(batch)):
                raise TaskError(f"task {task.name!r}: held-out batch {num_batches} holds {found}; its loss is {loss}")
            losses, metrics, num_samples = losses + loss * size, metrics + metric * size, num_samples + size
    if num_samples == 0:
        raise TaskError(f"task {task.name!r}: there are 0 held-out batches to evaluate on")
    sign = 1.0 if task.metric_direction == "maximize" or not _has_metric(task) else -1.0
    return Evaluation(losses / num_samples, sign * metrics / num_samples, num_samples)


def _has_metric(task: Task) -> bool:
    return task.metric is not None or task.evaluate is not None


def loss_and_metric(model: nn.Module, task: Task, batch: Batch) -> tuple[float, float]:
    """Return both for one batch, the metric as the task gives it.

    Raises:
        TaskError: one of them is not a number.
    """
    if task.evaluate is not None:
        loss, metric = task.evaluate(model, batch)
        return _number(loss, "loss", task), _number(metric, "metric", task)
    value = _number(task.loss(model, batch), "loss", task)
    return value, -value if task.metric is None else _number(task.metric(model, batch), "metric", task)


def _number(value: torch.Tensor | float, name: str, task: Task) -> float:
    try:
        if isinstance(value, str):
            raise TypeError
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        shape = f" of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else ""
        raise TaskError(
            f"task {task.name!r}: the {name} returned {type(value).__name__}{shape}; one number is needed"
        ) from None


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; every module gets back the mode it had."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode
