"""One trial: a short, real training of a task under a policy, measured. A diverged or impossible one is a result."""

from __future__ import annotations

import contextlib
import functools
import math
import statistics
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from autoprec.apply import (
    apply_policy,
    build_grad_scaler,
    remove_checkpointing,
    remove_policy,
    set_tf32,
    suspend_policy,
)
from autoprec.emulation import emulate
from autoprec.errors import TaskError
from autoprec.policy import Kind, Number, Policy
from autoprec.probes.headroom import LargestHalf, watch_headroom
from autoprec.tasks.batches import BatchStream, non_finite_in
from autoprec.tasks.protocol import Batch, Task
from autoprec.training import TrainingStep
from autoprec.trials.building import (
    build_model,
    build_schedulers,
    build_task_optimizers,
    perturb_weights,
    prepare_batch,
)
from autoprec.trials.compiling import compiled, forget_compiled, option_notes
from autoprec.trials.end_ranges import watch_end
from autoprec.trials.evaluation import Evaluation, estimate_batchnorm, evaluate
from autoprec.trials.failures import TrialEnd, classify, describe, format_traceback
from autoprec.trials.finiteness import find_in_buffers, find_in_forward, find_in_gradients
from autoprec.trials.isolation import RandomState, RandomStream, isolated, release, seed_everything
from autoprec.trials.outcome import EndRanges, Headroom, NonFinite, Outcome, TrialSettings
from autoprec.trials.replicas import open_replicas
from autoprec.trials.target import target_figures

__all__ = ["run_trial"]


def run_trial(task: Task, policy: Policy, settings: TrialSettings) -> Outcome:
    """Train the task for a few steps under `policy` and return what it gave.

    Training options are those of the task, whatever the policy was found with.

    Never raises for a trial that diverges or cannot run; what the task itself raises in FP32 is a `user_error` with its
    traceback. Random states and torch's switches are put back, and nothing of the trial stays alive.

    Raises:
        KeyboardInterrupt: passed through.
    """
    started = time.perf_counter()
    policy = policy if policy.training is None else policy.replace(training=None)
    trial = _Trial(task, policy, settings)
    with isolated():
        set_tf32(task.tf32)
        outcome = trial.run()
        if outcome.is_ok:
            with trial.timed("target"):
                outcome = _with_target(outcome, task, policy, settings)
    forget_compiled(task)
    release(trial.reference, torch.device(settings.device))
    seconds = {"wall_seconds": time.perf_counter() - started, "phase_seconds": trial.phase_seconds}
    return outcome.model_copy(update=seconds)


def _with_target(outcome: Outcome, task: Task, policy: Policy, settings: TrialSettings) -> Outcome:
    try:
        figures = target_figures(task, policy, settings)
    except Exception as error:
        return outcome.model_copy(
            update={
                "kind": classify(error, policy),
                "message": f"at the target shape: {describe(error)}",
                "traceback": format_traceback(error),
            }
        )
    return outcome.model_copy(
        update={
            "peak_memory_bytes": figures.peak_memory_bytes,
            "throughput_samples_per_second": figures.throughput_samples_per_second,
            "throughput_tokens_per_second": figures.throughput_tokens_per_second,
            "memory_by_category": figures.memory_by_category,
            "launch_share": figures.launch_share,
            "notes": [*outcome.notes, *figures.notes],
        }
    )


@dataclass
class _Trial:
    """One training as it goes; what was seen until then survives a failure."""

    task: Task
    policy: Policy
    settings: TrialSettings
    losses: list[float] = field(default_factory=list)
    grad_norms: list[float | None] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    phase_seconds: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    num_taken: int = 0
    num_skipped: int = 0
    step_number: int | None = None
    non_finite: NonFinite | None = None
    start: dict[str, Number] = field(default_factory=dict)
    end_ranges: EndRanges | None = None
    largest_half: LargestHalf = field(default_factory=LargestHalf)
    reference: weakref.ref[nn.Module] | None = None

    def __post_init__(self) -> None:
        self.device = torch.device(self.settings.device)
        asked = self.settings.emulate
        wanted = self.device.type == "cpu" if asked is None else asked
        self.emulates = wanted and bool(self.policy.low_precisions)
        self.num_steps = self.settings.warmup_steps + self.settings.measured_steps
        self.watches = self.settings.watch_headroom and "fp16" in self.policy.low_precisions
        self.data = RandomStream(self.settings.seed)
        self.replicas = open_replicas(self.settings)
        self.notes += option_notes(self.task, device=self.device, emulates=self.emulates)

    def run(self) -> Outcome:
        model: nn.Module | None = None
        try:
            if self.settings.measure_start:
                with self.timed("evaluation"):
                    self.start = self._measure_start()
            seed_everything(self.settings.seed)
            model = build_model(self.task, self.device)
            perturb_weights(model, self.settings.perturbation, seed=self.settings.seed)
            self.reference = weakref.ref(model)
            self.replicas.check_policy(self.policy)
            if self.replicas.rank:
                seed_everything(self.settings.seed + self.replicas.rank)  # dropout of other samples
            with self.timed("training"), self._arithmetic():
                self._train(model)
            with self.timed("evaluation"):
                if self.settings.watch_end:
                    self.end_ranges = watch_end(model, self.task, self._next(self._batches(1)))
                result = self._evaluate(model)
            return self._ok(*result)
        except Exception as error:
            return self._ended(error, model)
        finally:
            if model is not None:
                _strip(model)

    def _measure_start(self) -> dict[str, Number]:
        """Return what the held-out data gives at the start weights: of a model of its own, so that this run is as any.

        It is built and evaluated as the trained one is (batch statistics estimated anew), in FP32. A value that is not
        finite is left out.
        """
        seed_everything(self.settings.seed)
        found = self._held_out(build_model(self.task, self.device))
        self.data = RandomStream(self.settings.seed)
        values = {"start_accuracy": found.metric, "start_eval_loss": found.loss}
        return {name: Number(value=value, kind="measured") for name, value in values.items() if math.isfinite(value)}

    @contextlib.contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.phase_seconds[phase] = self.phase_seconds.get(phase, 0.0) + time.perf_counter() - started

    def _arithmetic(self) -> contextlib.AbstractContextManager[Any]:
        return emulate() if self.emulates else contextlib.nullcontext()

    def _train(self, model: nn.Module) -> None:
        apply_policy(model, self.policy)
        optimizers = build_task_optimizers(self.task, self.policy, model)
        anneal = self.settings.anneal
        step = TrainingStep(
            optimizers,
            grad_scaler=build_grad_scaler(self.policy, device=self.device),
            accumulation_steps=self.task.accumulation_steps,
            max_grad_norm=self.task.max_grad_norm,
            schedulers=build_schedulers(self.task, optimizers, num_steps=self.num_steps, anneal=anneal),
            model=model,
            on_skip=lambda number: self._note_skip(model, number),
        )
        running = compiled(self.replicas.wrap(model), self.task)
        batches = self._batches(self.num_steps * self.task.accumulation_steps * self.replicas.size)
        for number in range(1, self.num_steps + 1):
            self.step_number = number
            self._step(model, running, step, [self._own(batches) for _ in range(self.task.accumulation_steps)])
            self._check_rules()
        self._check_end(model, step)

    def _step(self, model: nn.Module, running: nn.Module, step: TrainingStep, batches: list[Batch]) -> None:
        started = time.perf_counter()
        losses: list[float] = []
        result = None
        for place, compute_loss in self.task.trained_losses:
            for batch in batches:
                randomness = RandomState()
                run = functools.partial(compute_loss, model, batch)
                with watch_headroom(model, self.largest_half) if self.watches else contextlib.nullcontext():
                    loss = compute_loss(running, batch)
                self._check_batch(loss, batch, number=len(losses) % len(batches))
                losses.append(self._check_loss(loss, run, model, randomness))
                result = step(loss, optimizer=place)
        assert result is not None
        self.seconds.append(time.perf_counter() - started)
        self.losses.append(sum(losses) / len(batches))
        self.grad_norms.append(result.grad_norm)
        self.num_taken, self.num_skipped = step.num_steps_taken, step.num_steps_skipped
        if result.scale is not None:
            self.scales.append(result.scale)

    def _check_batch(self, loss: Any, batch: Batch, *, number: int) -> None:
        """Name a batch that holds NaN or inf, where FP32 cannot train on it either."""
        if self.policy.low_precisions or not isinstance(loss, torch.Tensor) or bool(loss.detach().isfinite().all()):
            return
        found = non_finite_in(batch)
        if found:
            assert self.step_number is not None
            place = (self.step_number - 1) * self.task.accumulation_steps + number + 1
            raise TaskError(f"task {self.task.name!r}: training batch {place} holds {found}; its loss is not finite")

    def _check_loss(self, loss: Any, run: Callable[[], Any], model: nn.Module, randomness: RandomState) -> float:
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            shape = f" of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else ""
            raise TaskError(
                f"task {self.task.name!r}: the loss is {type(loss).__name__}{shape}; a scalar tensor is needed"
            )
        value = self.replicas.mean(float(loss.detach()), self.device)
        if math.isfinite(value):
            return value
        assert self.step_number is not None
        self._check_buffers(model)
        randomness.restore()
        place = find_in_forward(model, run, step=self.step_number)
        where = f"; first non-finite in module {place.module!r}" if place is not None else ""
        raise TrialEnd("non_finite_loss", f"the loss is {value} at step {self.step_number}{where}", non_finite=place)

    def _check_rules(self) -> None:
        rules, is_last = self.settings.abort, self.step_number == self.num_steps
        if rules is None or is_last:
            return
        reason = rules.reason(self.losses, num_skipped=self.num_skipped, num_steps=self.num_steps)
        if reason:
            raise TrialEnd("aborted", reason, non_finite=self.non_finite)

    def _note_skip(self, model: nn.Module, number: int) -> None:
        if self.non_finite is None:
            self.non_finite = find_in_gradients(model, step=number)
        self._check_buffers(model)

    def _check_buffers(self, model: nn.Module) -> None:
        assert self.step_number is not None
        place = find_in_buffers(model, step=self.step_number)
        if place is not None:
            message = f"non-finite {place.what} at step {self.step_number}"
            raise TrialEnd("non_finite_buffer", message, non_finite=place)

    def _check_end(self, model: nn.Module, step: TrainingStep) -> None:
        self._check_buffers(model)
        if not step.had_gradient:
            raise TaskError(
                f"task {self.task.name!r}: no parameter of the optimizer got a gradient in {self.num_steps} steps"
            )
        if self.num_taken == 0:
            scales = f" (loss scale {self.scales[0]:g} to {self.scales[-1]:g})" if self.scales else ""
            message = f"no step was taken: all {self.num_skipped} had non-finite gradients{scales}"
            raise TrialEnd("no_step_taken", message, non_finite=self.non_finite)

    def _batches(self, num_needed: int) -> BatchStream:
        def note(text: str) -> None:
            if text not in self.notes:
                self.notes.append(text)

        return BatchStream(
            self.task.train_batches, num_samples=self.task.num_samples, num_needed=num_needed, on_note=note
        )

    def _own(self, batches: BatchStream) -> Batch:
        return self.replicas.own(functools.partial(self._next, batches))

    def _next(self, batches: BatchStream) -> Batch:
        with self.data:
            batch = next(batches)
        return prepare_batch(self.task, batch, self.device)

    def _evaluate(self, model: nn.Module) -> tuple[float, float]:
        """Return held-out loss and metric: of the bare FP32 model, or under the policy where the settings say so."""
        with self._arithmetic() if self.settings.evaluate_under_policy else suspend_policy(model):
            result = self._held_out(model)
        if not math.isfinite(result.loss):
            raise TrialEnd("non_finite_loss", f"the held-out loss is {result.loss}")
        if not math.isfinite(result.metric):
            message = f"{self.task.metric_name} is {result.metric} on the held-out data while the loss is finite"
            raise TrialEnd("non_finite_loss" if self.policy.low_precisions else "user_error", message)
        return result.loss, result.metric

    def _held_out(self, model: nn.Module) -> Evaluation:
        self.data = RandomStream(self.settings.seed)
        num_batches = self.settings.batchnorm_batches
        batches = self._batches(num_batches)
        estimate_batchnorm(model, self.task, (self._next(batches) for _ in range(num_batches)))
        return evaluate(model, self.task, device=self.device)

    def _ok(self, loss: float, metric: float) -> Outcome:
        kind: Kind = "emulated" if self.emulates else "measured"
        return self._outcome(
            kind="ok", accuracy=Number(value=metric, kind=kind), eval_loss=Number(value=loss, kind=kind)
        )

    def _ended(self, error: Exception, model: nn.Module | None) -> Outcome:
        kind = classify(error, self.policy)
        if isinstance(error, TrialEnd) and error.non_finite is not None:
            self.non_finite = error.non_finite
        shows_traceback = kind in ("user_error", "unsupported") and not isinstance(error, TrialEnd)
        return self._outcome(
            kind=kind,
            message=describe(error, model),
            step=self.step_number,
            traceback=format_traceback(error) if shows_traceback else "",
        )

    def _headroom(self) -> Headroom | None:
        found = self.largest_half
        return Headroom(largest=found.value, module=found.module) if found.value else None

    def _outcome(self, **fields: Any) -> Outcome:
        measured = self.seconds[self.settings.warmup_steps :]
        return Outcome(
            train_losses=self.losses,
            grad_norms=self.grad_norms,
            scale_history=self.scales,
            num_steps_taken=self.num_taken,
            num_steps_skipped=self.num_skipped,
            num_steps_planned=self.num_steps,
            first_non_finite=self.non_finite,
            headroom=self._headroom(),
            step_seconds_here=statistics.median(measured) if measured else None,
            notes=self.notes,
            end_ranges=self.end_ranges,
            **self.start,
            **fields,
        )


def _strip(model: nn.Module) -> None:
    """Break the reference cycles that an installed policy makes, so that the model dies with its last name."""
    with contextlib.suppress(Exception):
        remove_policy(model)
    remove_checkpointing(model)
