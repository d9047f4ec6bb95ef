"""The parts of one training under a policy: the bare model, the optimizer and the schedule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from autoprec.apply import build_optimizer
from autoprec.errors import TaskError
from autoprec.policy import Policy
from autoprec.tasks.batches import move_batch, open_batches
from autoprec.tasks.protocol import Task
from autoprec.training import needs_closure

__all__ = ["build_model", "build_task_optimizer", "build_scheduler", "optimizer_function"]


def build_model(task: Task, device: torch.device, *, build: Callable[[], nn.Module] | None = None) -> nn.Module:
    """Build the task's bare model on `device`, in training mode; lazy modules get their shapes from one batch.

    Raises:
        TaskError: the task did not build a module, or nothing in it can be trained.
    """
    model = (build or task.model)()
    if not isinstance(model, nn.Module):
        raise TaskError(f"task {task.name!r}: model() returned {type(model).__name__}; an nn.Module is needed")
    model.to(device)
    if any(is_lazy(parameter) for parameter in (*model.parameters(), *model.buffers())):
        _materialise(model, task, device)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise TaskError(f"task {task.name!r}: no parameter of {type(model).__name__} is trainable (all are frozen)")
    return model.train()


def _materialise(model: nn.Module, task: Task, device: torch.device) -> None:
    model.eval()
    for batch in open_batches(task.train_batches, name="training"):
        with torch.no_grad():
            task.loss(model, move_batch(batch, device))
        return


def build_task_optimizer(task: Task, policy: Policy, parameters: Any) -> torch.optim.Optimizer:
    """Build the task's optimizer with the policy's eps and amsgrad.

    A class gets the task's settings; a function gets the parameters alone, and its groups the policy's values.

    Raises:
        TaskError: the function returned something else than an optimizer, or it needs a closure (LBFGS).
    """
    if isinstance(task.optimizer, type):
        kind = cast("type[torch.optim.Optimizer]", task.optimizer)
        return _without_closure(task, build_optimizer(policy, kind, parameters, **task.optimizer_settings))
    optimizer = task.optimizer(parameters)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TaskError(
            f"task {task.name!r}: optimizer() returned {type(optimizer).__name__}; a torch.optim.Optimizer is needed"
        )
    chosen = {} if policy.optimizer is None else {"eps": policy.optimizer.eps, "amsgrad": policy.optimizer.amsgrad}
    for group in optimizer.param_groups:
        group.update({key: value for key, value in chosen.items() if value is not None and key in group})
    return _without_closure(task, optimizer)


def _without_closure(task: Task, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    if needs_closure(optimizer):
        raise TaskError(
            f"task {task.name!r}: {type(optimizer).__name__} evaluates the loss in a closure, which grad scalers do not"
            " support; policies with FP16 could not be compared: use another optimizer"
        )
    return optimizer


def optimizer_function(task: Task, policy: Policy) -> Callable[..., torch.optim.Optimizer]:
    """Return the function from parameters to the optimizer that a trial of this policy uses."""
    return lambda parameters: build_task_optimizer(task, policy, parameters)


def build_scheduler(task: Task, optimizer: torch.optim.Optimizer, *, num_steps: int, anneal: bool) -> Any:
    """Return the task's scheduler, else where asked a cosine that ends at zero, else None."""
    if task.scheduler is not None:
        return task.scheduler(optimizer, num_steps)
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=num_steps) if anneal else None
