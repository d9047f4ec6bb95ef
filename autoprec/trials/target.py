"""Memory and throughput of the target shape: measured where the device is a GPU, else computed and predicted."""

from __future__ import annotations

import hashlib
import itertools
import json
import statistics
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from autoprec.apply import (
    apply_policy,
    build_grad_scaler,
    checkpoint_modules,
    read_structure,
    remove_checkpointing,
)
from autoprec.estimates import Roofline, StepEstimate, estimate_step
from autoprec.policy import Number, Policy, resolve_precisions
from autoprec.tasks.batches import count_samples, longest_batch
from autoprec.tasks.protocol import Batch, Task
from autoprec.training import TrainingStep
from autoprec.trials.building import build_model, build_task_optimizers, prepare_batch
from autoprec.trials.compiling import compiled, forget_compiled
from autoprec.trials.isolation import release, seed_everything
from autoprec.trials.outcome import TrialSettings
from autoprec.trials.replicas import Replicas, open_replicas

__all__ = ["TargetEstimator", "TargetFigures", "estimate_figures", "target_batch", "target_estimate", "target_figures"]

NUM_WARMUP_STEPS = 5
NUM_TIMED_STEPS = 15
MAX_BATCHES = 64
"""Of a loader, among how many batches the longest is looked for."""


@dataclass(frozen=True, slots=True)
class TargetFigures:
    """What one optimizer step of the real run takes; plain data."""

    peak_memory_bytes: Number
    throughput_samples_per_second: Number
    throughput_tokens_per_second: Number | None = None
    memory_by_category: dict[str, float] = field(default_factory=dict)
    launch_share: float | None = None
    notes: tuple[str, ...] = ()


_ESTIMATES: weakref.WeakKeyDictionary[Task, dict[str, StepEstimate]] = weakref.WeakKeyDictionary()


def target_figures(task: Task, policy: Policy, settings: TrialSettings) -> TargetFigures:
    """Return memory and throughput at the task's target shape, or at its longest training batch where it has none.

    On CUDA a few steps are timed and the peak is measured. Elsewhere one step is estimated for `settings.gpu`; equal
    policies are estimated once.
    """
    device = torch.device(settings.device)
    if device.type == "cuda":
        seed_everything(settings.seed)
        return _measure(task, policy, device, open_replicas(settings))
    return estimate_figures(task, policy, settings)


def estimate_figures(task: Task, policy: Policy, settings: TrialSettings) -> TargetFigures:
    """Return computed memory and predicted throughput for `settings.gpu`, on a CPU, whatever the device of the trials.

    Sets the random state; equal policies are estimated once.
    """
    estimate = target_estimate(task, policy, settings)
    alone, size = estimate.throughput_samples_per_second, settings.num_processes
    throughput = alone.model_copy(update={"value": alone.value * size})
    return TargetFigures(
        peak_memory_bytes=estimate.peak_memory_bytes,
        throughput_samples_per_second=throughput,
        throughput_tokens_per_second=_per_token(task, throughput),
        memory_by_category={name: float(size) for name, size in estimate.by_category.items()},
        launch_share=estimate.launch_share,
        notes=(*estimate.notes, *([f"throughput: {size} times that of one GPU, no exchange counted"] * (size > 1))),
    )


def target_estimate(task: Task, policy: Policy, settings: TrialSettings) -> StepEstimate:
    """Estimate one step at the target shape for `settings.gpu`; equal policies are estimated once."""
    seed_everything(settings.seed)
    cached = _ESTIMATES.setdefault(task, {})
    rules = _key(settings.gpu, policy, [policy.default, list(policy.modules.items())])
    if rules not in cached:  # building a model to resolve the same rules again costs as much as two training steps
        model = build_model(task, torch.device("cpu"), build=_target_model(task))
        key = _policy_key(model, policy, settings.gpu)
        if key not in cached:
            cached[key] = _estimate(model, task, policy, settings.gpu)
        cached[rules] = cached[key]
    return cached[rules]


def _target_model(task: Task) -> Callable[[], nn.Module] | None:
    return task.target.model if task.target is not None else None


_BATCHES: weakref.WeakKeyDictionary[Task, Batch] = weakref.WeakKeyDictionary()


def target_batch(task: Task) -> Batch:
    """Return a batch of the target shape, else the longest one of an epoch's first; always the same in a process."""
    if task.target is not None:
        return task.target.make_batch()
    if task not in _BATCHES:
        seed_everything(0)
        _BATCHES[task] = longest_batch(task.train_batches, max_batches=MAX_BATCHES)
    return _BATCHES[task]


def _policy_key(model: nn.Module, policy: Policy, gpu: str) -> str:
    """A hash of the effective policy: rules that lead to the same precisions are the same."""
    precisions, _ = resolve_precisions(policy, read_structure(model).parents)
    return _key(gpu, policy, precisions)


def _key(gpu: str, policy: Policy, precisions: Any) -> str:
    """A hash of what decides an estimate, by rules or by the precisions that these lead to."""
    optimizer = policy.optimizer.model_dump() if policy.optimizer is not None else None
    text = json.dumps([gpu, policy.dtype, precisions, optimizer], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _per_token(task: Task, samples_per_second: Number) -> Number | None:
    """Turn samples a second into tokens a second, where the task counts tokens."""
    if task.num_tokens is None:
        return None
    batch = target_batch(task)
    tokens = task.num_tokens(batch) / (task.num_samples or count_samples)(batch)
    return Number(value=samples_per_second.value * tokens, kind=samples_per_second.kind)


def _estimate(
    model: nn.Module,
    task: Task,
    policy: Policy,
    gpu: str,
    *,
    batch: Batch | None = None,
    batch_size: int | None = None,
    accumulation_steps: int | None = None,
) -> StepEstimate:
    """Estimate one step; None takes the task's own batch, its size, and the task's accumulation."""
    return estimate_step(
        model,
        prepare_batch(task, target_batch(task) if batch is None else batch, torch.device("cpu")),
        task.loss,
        losses=tuple(task.losses.values()),
        policy=policy,
        optimizers=lambda copied: build_task_optimizers(task, policy, copied),
        accumulation_steps=accumulation_steps or task.accumulation_steps,
        gpu=gpu,
        batch_size=batch_size,
        num_samples=task.num_samples,
        roofline=None if task.tf32 is None else Roofline(tf32=task.tf32),
    )


class TargetEstimator:
    """Estimates steps of one task at its target shape and at other batch sizes; builds model and batch once.

    Attributes:
        model: the bare model; estimates run on copies of it.
        num_samples: of the batch at the target shape.
    """

    def __init__(self, task: Task, settings: TrialSettings) -> None:
        self._task, self._gpu = task, settings.gpu
        seed_everything(settings.seed)
        self.model = build_model(task, torch.device("cpu"), build=_target_model(task))
        self._batch = target_batch(task)
        self.num_samples = (task.num_samples or count_samples)(self._batch)
        self._known: dict[tuple[str, int, int, tuple[str, ...]], StepEstimate] = {}

    def __call__(
        self,
        policy: Policy,
        *,
        batch_size: int | None = None,
        accumulation_steps: int | None = None,
        checkpoint: Sequence[str] = (),
    ) -> StepEstimate:
        """Estimate one step; None takes the target's batch and the task's accumulation. Equal questions cost nothing.

        Args:
            checkpoint: modules to compute again in the backward pass, beside those of the task.
        """
        size, steps = batch_size or self.num_samples, accumulation_steps or self._task.accumulation_steps
        key = (_policy_key(self.model, policy, self._gpu), size, steps, tuple(sorted(checkpoint)))
        if key not in self._known:
            checkpoint_modules(self.model, checkpoint)
            try:
                self._known[key] = _estimate(
                    self.model,
                    self._task,
                    policy,
                    self._gpu,
                    batch=self._batch,
                    batch_size=size,
                    accumulation_steps=steps,
                )
            finally:
                remove_checkpointing(self.model)
                checkpoint_modules(self.model, self._task.checkpoint)
        return self._known[key]


def _measure(task: Task, policy: Policy, device: torch.device, replicas: Replicas) -> TargetFigures:
    """Time steps with CUDA events after a warm-up; the peak is that of the timed steps, from a fresh reset.

    The throughput is the group's, the memory this process's.
    """
    model = build_model(task, device, build=_target_model(task))
    reference = weakref.ref(model)
    apply_policy(model, policy)
    batch = prepare_batch(task, target_batch(task), device)
    running = compiled(replicas.wrap(model), task)
    step = TrainingStep(
        build_task_optimizers(task, policy, model),
        grad_scaler=build_grad_scaler(policy, device=device),
        accumulation_steps=task.accumulation_steps,
        max_grad_norm=task.max_grad_norm,
        model=model,
        report_norm=False,
    )
    events = [
        torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        for _ in range(NUM_TIMED_STEPS + 1)
    ]
    with torch.cuda.device(device):
        for _ in range(NUM_WARMUP_STEPS):
            _run_step(step, running, task, batch)
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        events[0].record()
        for event in events[1:]:
            _run_step(step, running, task, batch)
            event.record()
        torch.cuda.synchronize(device)
        peak = torch.cuda.max_memory_allocated(device)
    milliseconds = [start.elapsed_time(end) for start, end in itertools.pairwise(events)]
    samples = (task.num_samples or count_samples)(batch) * task.accumulation_steps * replicas.size
    throughput = Number(value=samples / (statistics.median(milliseconds) / 1e3), kind="measured")
    per_token = _per_token(task, throughput)
    del model, running, step, batch
    forget_compiled(task)
    release(reference, device)
    return TargetFigures(
        peak_memory_bytes=Number(value=float(peak), kind="measured"),
        throughput_samples_per_second=throughput,
        throughput_tokens_per_second=per_token,
    )


def _run_step(step: TrainingStep, model: nn.Module, task: Task, batch: Batch) -> None:
    for place, compute_loss in task.trained_losses:
        for _ in range(task.accumulation_steps):
            step(compute_loss(model, batch), optimizer=place)
