"""Take a profile: a few real FP32 training steps, watched at the start and on the hardest batch, and the estimates."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from autoprec.apply import remove_checkpointing
from autoprec.errors import TaskError
from autoprec.policy import Policy
from autoprec.probes.ranges import HalfRun, UnitRanges, watch_ranges
from autoprec.profiling.costs import ShapeScale, cast_seconds, unit_costs
from autoprec.profiling.profile import HalfError, Profile, ProfileSettings, UnitProfile
from autoprec.tasks.batches import BatchStream, non_finite_in, stored_values
from autoprec.tasks.protocol import Batch, Loss, Task
from autoprec.training import TrainingStep
from autoprec.trials.building import build_model, build_task_optimizers, prepare_batch
from autoprec.trials.isolation import RandomStream, isolated, seed_everything
from autoprec.trials.outcome import TrialSettings

__all__ = ["profile_as_json", "take_profile"]

FP32 = Policy(default="fp32")


def take_profile(
    task: Task,
    units: Sequence[str],
    settings: TrialSettings,
    *,
    profile_settings: ProfileSettings | None = None,
    study_name: str = "",
) -> Profile:
    """Train `task` for a few FP32 steps and look; the random state and torch's switches are put back.

    Each unit's activations, their gradients and its parameters' gradients are counted by octave; its error in FP16 and
    in BF16 is weighed by the gradient, at the first step and again on the batch with the highest loss, after the other
    steps.
    Time and memory in each precision come from the estimates for `settings.gpu`.

    Raises:
        TaskError, or what the task itself raises in FP32.
    """
    chosen = profile_settings or ProfileSettings()
    started = time.perf_counter()
    with isolated():
        seed_everything(settings.seed)
        steps = _Steps(task, units, settings, chosen)
        steps.run()
        scale = ShapeScale.between(steps.first_batch, task)
        costs = unit_costs(task, units, settings)
    return Profile(
        study_name=study_name,
        num_steps=len(steps.losses),
        watched_steps=steps.watched,
        losses=steps.losses,
        gradient_maxima=steps.maxima,
        units={
            name: UnitProfile(
                activations=seen.activations,
                activation_gradients=seen.activation_gradients,
                parameter_gradients=seen.parameter_gradients,
                half={dtype: _error(run, steps) for dtype, run in seen.half.items()},
                output_elements=scale.elements(seen.output_shape),
                cast_seconds=cast_seconds(scale.elements(seen.output_shape), settings.gpu),
                costs=costs.units.get(name, {}),
            )
            for name, seen in steps.seen.items()
        },
        step_seconds=costs.step_seconds,
        peak_bytes=costs.peak_bytes,
        target=costs.target,
        wall_seconds=time.perf_counter() - started,
        notes=costs.notes,
    )


def profile_as_json(task: Task, units: Sequence[str], settings: dict[str, Any], study_name: str) -> dict[str, Any]:
    """Take a profile where all that goes in and comes out is JSON: in a worker process."""
    profile = take_profile(task, units, TrialSettings.model_validate(settings), study_name=study_name)
    return profile.model_dump(mode="json")


def _error(run: HalfRun, steps: _Steps) -> HalfError:
    return HalfError(
        forward=_relative(run.forward_error, steps),
        gradient=_relative(run.gradient_error, steps),
        output=min(run.output_error, 1e6) if math.isfinite(run.output_error) else 1e6,
        overflows=run.overflows,
    )


def _relative(squared: float, steps: _Steps) -> float:
    """From a sum of squares over the watched steps to a relative change of the loss; capped where it is no number."""
    typical = sum(abs(loss) for loss in steps.losses) / len(steps.losses)
    value = math.sqrt(squared / len(steps.watched)) / max(typical, 1e-6) if squared < math.inf else 1e6
    return min(value, 1e6) if math.isfinite(value) else 1e6


class _Steps:
    """The training steps of one profile."""

    def __init__(self, task: Task, units: Sequence[str], settings: TrialSettings, chosen: ProfileSettings) -> None:
        self._task, self._settings, self._chosen = task, settings, chosen
        self._device = torch.device(settings.device)
        self._data = RandomStream(settings.seed)
        self._model = build_model(task, self._device)
        remove_checkpointing(self._model)  # each unit is to be seen once
        self.seen = {name: UnitRanges() for name in units}
        self.losses: list[float] = []
        self.maxima: list[float] = []
        self.watched: list[int] = []
        self.first_batch: Batch = None

    def run(self) -> None:
        task, model = self._task, self._model
        optimizers = build_task_optimizers(task, FP32, model)
        for optimizer in optimizers:
            optimizer.register_step_pre_hook(lambda *_: self._note_gradient())
        step = TrainingStep(optimizers, max_grad_norm=task.max_grad_norm, model=model, report_norm=False)
        num_batches = self._chosen.num_steps
        batches = BatchStream(task.train_batches, num_samples=task.num_samples, num_needed=num_batches)
        hardest: tuple[float, Any] = (-math.inf, None)
        for _ in range(num_batches):
            with self._data:
                batch = prepare_batch(task, next(batches), self._device)
            if self.first_batch is None:
                self.first_batch = batch
            loss = self._step(step, batch, watch=not self.losses)
            if not math.isfinite(loss):
                found = non_finite_in(batch)
                held = f": training batch {len(self.losses)} holds {found}" if found else ", from finite numbers"
                raise TaskError(f"task {task.name!r}: the FP32 loss is {loss} at step {len(self.losses)}{held}")
            hardest = max(hardest, (loss, batch), key=lambda pair: pair[0])
        if num_batches > 1:
            self._step(step, hardest[1], watch=True)

    def _step(self, step: TrainingStep, batch: Batch, *, watch: bool) -> float:
        """Take one step, or watch forward and backward in its place; return the sum of the task's losses."""
        self.losses.append(0.0)
        self.maxima.append(0.0)
        for place, compute_loss in self._task.trained_losses:
            if watch:
                self._watch(compute_loss, batch)
                continue
            loss = compute_loss(self._model, batch)
            step(loss, optimizer=place)
            self.losses[-1] += float(loss.detach())
        if watch:
            self.watched.append(len(self.losses))
        return self.losses[-1]

    def _watch(self, compute_loss: Loss, batch: Batch) -> None:
        with watch_ranges(self._model, self.seen, scale=self._chosen.loss_scale) as ranges:
            loss = compute_loss(self._model, batch)
            loss.backward()  # type: ignore[no-untyped-call]
        self._merge(ranges.items())
        self.losses[-1] += float(loss.detach())
        self._note_gradient()
        self._model.zero_grad()

    def _note_gradient(self) -> None:
        self.maxima[-1] = max(self.maxima[-1], _largest_gradient(self._model))

    def _merge(self, ranges: Iterable[tuple[str, UnitRanges]]) -> None:
        for name, new in ranges:
            known = self.seen[name]
            known.activations += new.activations
            known.activation_gradients += new.activation_gradients
            known.parameter_gradients += new.parameter_gradients
            known.half = {dtype: run + new.half[dtype] for dtype, run in known.half.items()}
            known.output_shape = new.output_shape or known.output_shape


def _largest_gradient(model: nn.Module) -> float:
    gradients = [stored_values(p.grad)[-1] for p in model.parameters() if p.grad is not None]
    largest = [float(norm) for norm in torch._foreach_norm(gradients, math.inf)] if gradients else [0.0]
    return min(max(largest), 3.4e38)
