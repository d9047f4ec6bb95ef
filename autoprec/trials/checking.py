"""Check a task before its first trial: each part is used once, as a trial uses it; a wrong one is one clear message."""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from autoprec.emulation import emulate
from autoprec.errors import ApplyError, AutoprecError, StudyError, TaskError
from autoprec.estimates.fakes import loss_of_fakes
from autoprec.policy import Policy
from autoprec.tasks.batches import (
    BatchStream,
    count_samples,
    describe_loader,
    non_finite_in,
    open_batches,
    same_values,
    tensors_of,
)
from autoprec.tasks.loading import explain
from autoprec.tasks.protocol import Batch, Batches, OneShot, TargetShape, Task
from autoprec.training import StepResult, TrainingStep, list_dtypes, low_precision_parameters
from autoprec.trials.building import build_model, build_schedulers, build_task_optimizers, prepare_batch
from autoprec.trials.evaluation import estimate_batchnorm, evaluating, loss_and_metric
from autoprec.trials.failures import is_out_of_memory
from autoprec.trials.isolation import isolated, release, seed_everything
from autoprec.trials.outcome import TrialSettings

__all__ = ["RAISES_IN_AUTOCAST", "check_task"]

RAISES_IN_AUTOCAST = "the task's loss raises inside a plain torch.autocast block, which a policy does without"
"""How the note begins that plain autocast around the loss is no way to train this task; what raised follows."""
MAX_NAMES = 4
"""How many parameters a note names."""


def check_task(task: Task, settings: TrialSettings, *, num_steps: int) -> list[str]:
    """Build, train one step on one batch and evaluate one held-out batch, all in FP32; return what a reader must know.

    One-shot iterators are not used up: what they give is kept. Random states are as before.

    Args:
        task: what is to be searched.
        settings: device and seed.
        num_steps: the longest training that will be asked for, for iterators that can give only so much.

    Raises:
        TaskError: a part is not what a trial needs: the field, what it was or returned, and what is needed. Chained to
            the error of the user's own code where that raised.
        StudyError: one batch does not fit in memory.
    """
    check = _Check(task, settings, num_steps)
    with isolated():
        check.fields()
        batch = check.batches()
        model = check.model()
        check.training(model, batch)
        check.plain_autocast(model, batch)
        check.evaluation(model, batch)
        check.target(model)
    del model, batch
    release(None, torch.device(settings.device))
    return check.notes


class _Check:
    def __init__(self, task: Task, settings: TrialSettings, num_steps: int) -> None:
        self.task = task
        self.seed = settings.seed
        self.device = torch.device(settings.device)
        self.num_batches = num_steps * task.accumulation_steps
        self.notes: list[str] = []
        self.frozen_half: dict[str, torch.dtype] = {}

    def error(self, text: str) -> TaskError:
        return TaskError(f"task {self.task.name!r}: {text}")

    def call(self, shown: str, function: Any, *arguments: Any) -> Any:
        """Call a function of the user's; `shown` is the call as the protocol writes it."""
        if not callable(function):
            raise self.error(f"{shown.partition('(')[0]} is {_what(function)}; a function is needed, called as {shown}")
        problem = _signature_problem(function, arguments)
        if problem is not None:
            raise self.error(f"{shown} is how it is called, and its signature does not allow that: {problem}")
        return self.run(shown, lambda: function(*arguments))

    def run(self, shown: str, action: Callable[[], Any]) -> Any:
        try:
            return action()
        except ApplyError as error:
            raise self.error(str(error)) from error
        except TaskError as error:
            if str(error).startswith("task "):
                raise
            raise self.error(str(error)) from error
        except AutoprecError:
            raise
        except (Exception, SystemExit) as error:
            if is_out_of_memory(error):
                raise StudyError(
                    f"FP32 does not fit in memory: {shown} {explain(error)}; give smaller batches"
                ) from error
            raise self.error(f"{shown} {explain(error)}{self._about_frozen(error)}") from error

    def _about_frozen(self, error: BaseException) -> str:
        """Say what to do where FP32 code met frozen half weights, which autocast alone brings together."""
        if not self.frozen_half or "type" not in str(error):
            return ""
        return (
            f"; frozen weights are half ({list_dtypes(self.frozen_half, count=MAX_NAMES)}), and FP32, which everything"
            " is compared with, cannot compute with them: build the model with them in FP32 (`.float()`), and a policy"
            " of bf16 or fp16 computes with half copies of them"
        )

    def fields(self) -> None:
        task = self.task
        if not isinstance(task.name, str) or not task.name.strip():
            raise TaskError(f"the task's name is {task.name!r}; a text that is not empty is needed")
        if isinstance(task.model, nn.Module):
            raise self.error(
                f"model is a {type(task.model).__name__}; a function that builds it is needed, since every trial starts"
                " from fresh weights"
            )
        if isinstance(task.optimizer, torch.optim.Optimizer):
            raise self.error(
                f"optimizer is an {type(task.optimizer).__name__} that was built already; its class, or a function from"
                " parameters to an optimizer, is needed"
            )
        builders = task.optimizer.values() if isinstance(task.optimizer, Mapping) else [task.optimizer]
        for builder in builders:
            if not callable(builder):
                raise self.error(
                    f"optimizer is {_what(builder)}; a class, or a function from parameters to an optimizer, is needed"
                )
        norm = task.max_grad_norm
        if norm is not None and (not isinstance(norm, int | float) or isinstance(norm, bool) or not norm > 0):
            raise self.error(f"max_grad_norm is {_what(norm)}; a number above 0, or None for no clipping, is needed")
        if task.target is not None and not isinstance(task.target, TargetShape):
            raise self.error(f"target is {_what(task.target)}; a TargetShape is needed")
        for name in ("metric", "evaluate", "scheduler", "num_samples", "num_tokens"):
            value = getattr(task, name)
            if value is not None and not callable(value):
                raise self.error(f"{name} is {_what(value)}; a function or None is needed")
        for name in ("settings", "optimizer_settings", "losses"):
            if not isinstance(getattr(task, name), Mapping):
                raise self.error(f"{name} is {_what(getattr(task, name))}; a mapping is needed")
        for key, value in task.settings.items():
            try:
                json.dumps(value, allow_nan=False)
            except (TypeError, ValueError):
                raise self.error(f"settings[{key!r}] is {_what(value)}; a JSON value is needed") from None

    def batches(self) -> Batch:
        """Return the first training batch that a trial would use."""
        first = self._first("train_batches", self.task.train_batches)
        self._count_samples("train_batches", first)
        if self.task.num_tokens is not None:
            self._count("num_tokens(batch)", self.task.num_tokens, first)
        self._count_samples("eval_batches", self._first("eval_batches", self.task.eval_batches))
        stream = BatchStream(
            self.task.train_batches, num_samples=self.task.num_samples, num_needed=self.num_batches, on_note=self.note
        )
        batch: Batch = self.run("train_batches", lambda: self._drawn(stream))
        if not same_values(first, self._first("train_batches", self.task.train_batches)):
            self.note(
                "the training batches differ between two openings under one seed, so that no two trials see the same:"
                " let whatever is random in them come from torch's global random state"
            )
        return batch

    def _drawn(self, stream: BatchStream) -> Batch:
        batch = next(stream)
        if isinstance(self.task.train_batches, OneShot):
            for _ in range(self.num_batches - 1):
                next(stream)
        return batch

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def _first(self, field: str, batches: Batches) -> Batch:
        seed_everything(self.seed)
        opened: Any = self.call(f"{field}()", batches) if callable(batches) else batches
        if isinstance(opened, Iterator) and callable(batches) and self.call(f"{field}()", batches) is opened:
            raise self.error(
                f"{field}() returned one iterator twice; a function has to return a fresh one each time it is called"
                " (or give the iterator itself: what it gives is then kept)"
            )
        found = object()
        name = f"{field}()" if callable(batches) else field
        first = self.run(field, lambda: next(open_batches(opened, name=name), found))
        if first is found:
            raise self.error(f"{field}: there are 0 batches{describe_loader(opened)}; at least one is needed")
        return first

    def _count_samples(self, field: str, batch: Batch) -> int:
        """Return how many samples a batch of this field has, as a trial counts them."""
        if self.task.num_samples is not None:
            return self._count("num_samples(batch)", self.task.num_samples, batch)
        number: int = self.run(field, lambda: count_samples(batch))
        if number < 1:
            raise self.error(f"{field} gave a batch without samples: {_what(tensors_of(batch)[0])}")
        return number

    def _count(self, shown: str, count: Callable[[Batch], Any], batch: Batch) -> int:
        number: Any = self.call(shown, count, batch)
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            raise self.error(f"{shown} returned {_what(number)}; a whole number from 1 is needed")
        return number

    def model(self) -> nn.Module:
        """Return a bare model in training mode."""
        seed_everything(self.seed)
        model = self.call("model()", self.task.model)
        seed_everything(self.seed)
        if isinstance(model, nn.Module) and not _same_weights(model, self.call("model()", self.task.model), self.error):
            self.note("model() gives other weights each time, under one seed: trials do not start from the same ones")
        built: nn.Module = self.run(
            "loss(model, batch)", lambda: build_model(self.task, self.device, build=lambda: model)
        )
        self.frozen_half = {
            name: p.dtype
            for name, p in built.named_parameters()
            if not p.requires_grad and p.itemsize < 4 and p.is_floating_point()
        }
        half = low_precision_parameters(built)
        if half:
            raise self.error(
                f"trainable parameters must be FP32 masters, found {list_dtypes(half)}; build the model in FP32, or"
                " give the task lift_half_parameters=True"
            )
        return built

    def training(self, model: nn.Module, batch: Batch) -> None:
        """Take one optimizer step in FP32, from one micro-batch."""
        shown = "optimizer(parameters)"
        optimizers = self.run(shown, lambda: build_task_optimizers(self.task, Policy(default="fp32"), model))
        self._parameters(model, optimizers)
        step = self.run(
            "the training step",
            lambda: TrainingStep(
                optimizers,
                accumulation_steps=self.task.accumulation_steps,
                max_grad_norm=self.task.max_grad_norm,
                model=model,
            ),
        )
        schedulers = self._schedulers(optimizers)
        batch = prepare_batch(self.task, batch, self.device)
        result = None
        for place, compute_loss in self.task.trained_losses:
            name = "loss" if place is None else f"losses[{list(self.task.losses)[place]!r}]"
            loss = self._loss(f"{name}(model, batch)", compute_loss, model, batch)
            result = self.run(f"the step after {name}", functools.partial(_step, step, loss, place))
        if result is not None and all(result.without_gradient):
            raise self.error(
                "no parameter of the optimizer gets a gradient from the loss; it has to be computed by the model that"
                " loss(model, batch) is given"
            )
        for scheduler in schedulers:
            self.call("scheduler(optimizer, num_steps).step()", scheduler.step)

    def plain_autocast(self, model: nn.Module, batch: Batch) -> None:
        """Note where a loss cannot be computed inside an autocast block, as BCELoss; a policy leaves losses outside."""
        batch = prepare_batch(self.task, batch, self.device)
        kind = self.device.type
        if not torch.amp.is_autocast_available(kind):
            return
        buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]  # half may overflow in running statistics
        with torch.no_grad(), emulate() if kind == "cpu" else contextlib.nullcontext():
            for _, compute_loss in self.task.trained_losses:
                try:
                    with torch.autocast(kind, dtype=torch.float16):
                        compute_loss(model, batch)
                except Exception as error:
                    lacks_kernel = kind == "cpu" and "not implemented for" in str(error)  # says nothing of a GPU
                    if not is_out_of_memory(error) and not lacks_kernel:
                        self.note(f"{RAISES_IN_AUTOCAST}: {explain(error).removeprefix('raised ')}")
            for buffer, before in buffers:
                buffer.copy_(before)

    def _parameters(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        held = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
        names = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
        if not held & set(names):
            raise self.error(
                "optimizer(parameters) holds none of the model's trainable parameters; it has to be built from the"
                " parameters that it is given"
            )
        left = [name for key, name in names.items() if key not in held]
        if left:
            more = f" and {len(left) - MAX_NAMES} more" if len(left) > MAX_NAMES else ""
            self.note(f"in no optimizer, and so not trained: {', '.join(left[:MAX_NAMES])}{more}")

    def _schedulers(self, optimizers: Sequence[torch.optim.Optimizer]) -> list[Any]:
        if self.task.scheduler is None:
            return []
        shown = "scheduler(optimizer, num_steps)"
        problem = _signature_problem(self.task.scheduler, (optimizers[0], 1))
        if problem is not None:
            raise self.error(f"{shown} is how it is called, and its signature does not allow that: {problem}")
        found: list[Any] = self.run(
            shown, lambda: build_schedulers(self.task, optimizers, num_steps=self.num_batches, anneal=False)
        )
        for scheduler in found:
            if not callable(getattr(scheduler, "step", None)):
                raise self.error(f"{shown} returned {_what(scheduler)}; an object with step() is needed")
        return found

    def _loss(self, shown: str, compute_loss: Any, model: nn.Module, batch: Batch) -> torch.Tensor:
        loss = self.call(shown, compute_loss, model, batch)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.is_floating_point():
            raise self.error(f"{shown} returned {_what(loss)}; one floating number as a tensor is needed")
        if not loss.requires_grad:
            raise self.error(
                f"{shown} returned a tensor without gradient: detached, computed under no_grad, or not computed by the"
                " model"
            )
        if not math.isfinite(float(loss.detach())):
            found = non_finite_in(batch)
            held = f": the batch holds {found}" if found else "; nothing can be trained on it"
            raise self.error(f"{shown} is {float(loss.detach())} on the first batch, in FP32{held}")
        return loss

    def evaluation(self, model: nn.Module, first: Batch) -> None:
        """Estimate batch norms' statistics on the first training batch; loss and metric of the first held-out one."""
        first = prepare_batch(self.task, first, self.device)
        shown = "loss(model, batch), called with the batch norms' statistics estimated anew,"
        self.run(shown, lambda: estimate_batchnorm(model, self.task, [first]))
        batch = prepare_batch(self.task, self._first("eval_batches", self.task.eval_batches), self.device)
        task = self.task
        with evaluating(model):
            if task.evaluate is not None:
                pair = self.call("evaluate(model, batch)", task.evaluate, model, batch)
                if not isinstance(pair, tuple | list) or len(pair) != 2:
                    raise self.error(f"evaluate(model, batch) returned {_what(pair)}; (loss, metric) is needed")
            else:
                self.call("loss(model, batch)", task.loss, model, batch)
                if task.metric is not None:
                    self.call("metric(model, batch)", task.metric, model, batch)
            loss, metric = self.run("the evaluation", lambda: loss_and_metric(model, task, batch))
        for name, value in (("loss", loss), (task.metric_name, metric)):
            if not math.isfinite(value):
                found = non_finite_in(batch)
                why = f"the batch holds {found}" if found else "it is undefined on this held-out slice"
                raise self.error(f"{name} is {value} on the first held-out batch, in FP32: {why}")

    def target(self, model: nn.Module) -> None:
        """Make one batch of the target shape and compute its loss, on shapes alone where that works.

        Tasks by name are spared: their targets are tested.
        """
        task, target = self.task, self.task.target
        if target is None or (task.source is not None and not task.source.is_own):
            return
        batch = self.call("target.make_batch()", target.make_batch)
        number = self._count_samples("target.make_batch()", batch)
        if number != target.batch_size:
            raise self.error(
                f"target.batch_size is {target.batch_size!r}, and target.make_batch() made {number} samples"
            )
        if target.model is not None:
            build = functools.partial(self.call, "target.model()", target.model)
            model = self.run("target.model()", lambda: build_model(task, self.device, build=build))
        with torch.no_grad():
            try:
                loss_of_fakes(model, batch, task.loss)
            except Exception:
                moved = prepare_batch(task, batch, self.device)
                self.run("at the target shape, loss(model, batch)", lambda: task.loss(model, moved))


def _step(step: TrainingStep, loss: torch.Tensor, place: int | None) -> StepResult | None:
    """Take the step after one micro-batch, also where a window has more."""
    return step(loss, optimizer=place) or step.finish()


def _signature_problem(function: Any, arguments: Sequence[Any]) -> str | None:
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError as error:
        return str(error)
    except ValueError:  # a builtin that tells no signature
        return None
    return None


def _what(value: Any) -> str:
    """Return a value in a few words: its shape where it is a tensor, itself where it is short."""
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)} and dtype {str(value.dtype).removeprefix('torch.')}"
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)[:60]
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def _same_weights(model: nn.Module, other: Any, error: Callable[[str], TaskError]) -> bool:
    """Compare two models that were built under one seed."""
    if other is model:
        raise error("model() returned the same object twice; it has to build a new one each time it is called")
    if not isinstance(other, nn.Module):
        return True
    pairs = list(zip(model.parameters(), other.parameters(), strict=False))
    return all(is_lazy(a) or (a.shape == b.shape and torch.equal(a.cpu(), b.cpu())) for a, b in pairs)
