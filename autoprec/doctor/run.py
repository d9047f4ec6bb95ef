"""Run a training under watch for a few steps: a task, or a function with a loop of its own."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from autoprec.apply import apply_policy, build_grad_scaler, set_tf32
from autoprec.doctor.observations import Observations
from autoprec.doctor.watching import watch
from autoprec.emulation import emulate
from autoprec.emulation.cuda_names import cuda_names_on_cpu
from autoprec.errors import AutoprecError, TaskError
from autoprec.policy import Policy
from autoprec.tasks.batches import BatchStream
from autoprec.tasks.loading import explain
from autoprec.tasks.protocol import Task
from autoprec.training import TrainingStep, low_precision_parameters
from autoprec.trials.building import build_model, build_schedulers, build_task_optimizers, prepare_batch
from autoprec.trials.isolation import isolated, seed_everything
from autoprec.trials.outcome import TrialSettings

__all__ = ["examine"]

MICRO_BATCHES = 16
"""A loop that has made so many backward passes for each of the steps it is given, and has not stepped, never will."""


class _EnoughError(BaseException):
    """Ends a loop of somebody else's when it has been seen enough; no `except Exception` stops it."""


def examine(
    training: Task | Callable[[], Any],
    *,
    policy: Policy | None = None,
    settings: TrialSettings | None = None,
    num_steps: int = 12,
) -> Observations:
    """Train for a few steps and watch; random states and torch's switches are put back.

    Args:
        training: a task, or a function without arguments that trains by itself (or that returns a task). Such a
            function decides everything; it is ended after `num_steps` optimizer steps, wherever it is. An autocast and
            a grad scaler that name CUDA where there is none are the CPU's.
        policy: of a task; None is stock autocast in FP16 with torch's grad scaler.
        settings: seed, device and GPU. On a CPU half arithmetic and CUDA's autocast rules are emulated.

    Raises:
        TaskError: the function raised before anything was trained.
        ApplyError: the policy does not fit the task's model.
    """
    chosen = settings or TrialSettings()
    with isolated():
        seed_everything(chosen.seed)
        if isinstance(training, Task):
            return _examine_task(training, policy or Policy(), chosen, num_steps)
        names = cuda_names_on_cpu() if torch.device(chosen.device).type == "cpu" else nullcontext()
        with _arithmetic(chosen), names, watch(gpu=chosen.gpu, on_step=_stop_after(num_steps)) as seen:
            made = _run(training, seen)
    if isinstance(made, Task):
        return examine(made, policy=policy, settings=chosen, num_steps=num_steps)
    if not seen.num_backwards and not seen.half_parameters:
        raise TaskError(f"the function trained nothing: no backward pass was made{seen.error and f'; it {seen.error}'}")
    return seen


def _arithmetic(settings: TrialSettings) -> AbstractContextManager[Any]:
    wanted = torch.device(settings.device).type == "cpu" if settings.emulate is None else settings.emulate
    return emulate() if wanted else nullcontext()


def _stop_after(num_steps: int) -> Callable[[Observations], None]:
    def stop(seen: Observations) -> None:
        idle = not seen.num_steps and seen.num_backwards >= MICRO_BATCHES * num_steps
        if seen.num_steps >= num_steps or idle:
            raise _EnoughError

    return stop


def _run(function: Callable[[], Any], seen: Observations) -> Any:
    """Call the function; note what it raises, and return what it returns."""
    try:
        return function()
    except _EnoughError:
        return None
    except AutoprecError as error:
        seen.error = str(error)
    except Exception as error:
        seen.error = explain(error).removeprefix("raised ")
    return None


def _examine_task(task: Task, policy: Policy, settings: TrialSettings, num_steps: int) -> Observations:
    set_tf32(task.tf32)
    device = torch.device(settings.device)
    model = build_model(task, device)
    halves = low_precision_parameters(model)
    if halves:
        return Observations(half_parameters=halves)
    apply_policy(model, policy)
    with _arithmetic(settings), watch(model, gpu=settings.gpu, on_step=_stop_after(num_steps)) as seen:
        _run(lambda: _train(task, policy, model, device, num_steps), seen)
    return seen


def _train(task: Task, policy: Policy, model: nn.Module, device: torch.device, num_steps: int) -> None:
    optimizers = build_task_optimizers(task, policy, model)
    step = TrainingStep(
        optimizers,
        grad_scaler=build_grad_scaler(policy, device=device),
        accumulation_steps=task.accumulation_steps,
        max_grad_norm=task.max_grad_norm,
        schedulers=build_schedulers(task, optimizers, num_steps=num_steps, anneal=False),
        model=model,
    )
    num_batches = num_steps * task.accumulation_steps
    batches = BatchStream(task.train_batches, num_samples=task.num_samples, num_needed=num_batches)
    for _ in range(num_steps):
        ready = [prepare_batch(task, next(batches), device) for _ in range(task.accumulation_steps)]
        for place, compute_loss in task.trained_losses:
            for batch in ready:
                step(compute_loss(model, batch), optimizer=place)
