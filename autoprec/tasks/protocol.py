"""What is trained: a `Task` names every part of one training, with a sensible default for most of them."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from autoprec.errors import TaskError
from autoprec.tasks.options import training_options
from autoprec.tasks.source import TaskSource

__all__ = [
    "Batch",
    "Batches",
    "BuildOptimizer",
    "Loss",
    "OneShot",
    "OptimizersOfModel",
    "Task",
    "TargetShape",
    "takes_model",
]

Batch = Any
"""Whatever the task's own loss takes: a tensor, tuple, dict, named tuple or dataclass of tensors."""

Batches = Iterable[Batch] | Callable[[], Iterable[Batch]]
"""Ready batches (a list, a loader), or a function that returns a fresh iterable of them each time it is called.

Whatever is random in their order must come from the global random state: a trial seeds it before it opens them.
"""


Loss = Callable[[nn.Module, Batch], torch.Tensor]
"""`loss(model, batch)` -> scalar tensor; calls the model itself."""

BuildOptimizer = Callable[..., torch.optim.Optimizer | Sequence[torch.optim.Optimizer]]
"""A class such as `torch.optim.AdamW`, or a function from parameters, or the model, to an optimizer, or to several."""


MODEL_NAMES = ("model", "module", "network", "net")
"""What a function that builds an optimizer from the model calls it."""


@dataclass(frozen=True, slots=True)
class OptimizersOfModel:
    """A `Task.optimizer` that is called with the model itself instead of its parameters, as frameworks build theirs."""

    build: Callable[[nn.Module], torch.optim.Optimizer | Sequence[torch.optim.Optimizer]]

    def __call__(self, model: nn.Module) -> torch.optim.Optimizer | Sequence[torch.optim.Optimizer]:
        return self.build(model)


def takes_model(build: Any) -> bool:
    """Whether a `Task.optimizer` is called with the model: its only needed argument is called so, or annotated so.

    Classes of optimizers take parameters.
    """
    if isinstance(build, OptimizersOfModel):
        return True
    if isinstance(build, type) or not callable(build):
        return False
    try:
        parameters = list(inspect.signature(build).parameters.values())
        hints = typing.get_type_hints(build) if inspect.isroutine(build) else {}
    except (TypeError, ValueError, NameError):  # a builtin, or an annotation of a name that is not there
        hints = {}
        parameters = []
    if not parameters:
        return False
    hint = hints.get(parameters[0].name, parameters[0].annotation)
    if isinstance(hint, type) and hint is not inspect.Parameter.empty:
        return issubclass(hint, nn.Module)
    return parameters[0].name in MODEL_NAMES


class OneShot:
    """An iterator that can be gone through again, since the batches it gave are kept."""

    def __init__(self, iterator: Iterator[Batch]) -> None:
        self._iterator = iterator
        self._given: list[Batch] = []

    def __iter__(self) -> Iterator[Batch]:
        index = 0
        while True:
            if index == len(self._given):
                try:
                    self._given.append(next(self._iterator))
                except StopIteration:
                    return
            yield self._given[index]
            index += 1


@dataclass(frozen=True, slots=True)
class TargetShape:
    """The shape of the real run: memory and throughput are those of this shape.

    Attributes:
        make_batch: builds one batch of it.
        batch_size: its number of samples.
        description: for people, such as "128 x 3 x 224 x 224".
        model: builds the model for it, where its parameters depend on the input size; None takes the task's.
    """

    make_batch: Callable[[], Batch]
    batch_size: int
    description: str = ""
    model: Callable[[], nn.Module] | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Task:
    """One training task.

    `Task(name="mine", model=build, train_batches=batches, eval_batches=held_out, loss=loss)` is a whole task.

    Attributes:
        name: shown and stored; no path.
        model: builds a fresh model; called for each trial with the seed set.
        train_batches: the training batches, restarted where they end; a one-shot iterator must give enough of them.
        eval_batches: held-out batches, all of them used, each weighted by its number of samples.
        loss: `loss(model, batch)` -> scalar tensor; calls the model itself. Trained on, and measured on held-out data.
        losses: name of a submodule -> the loss that trains it, with an optimizer of its own (a GAN): in this order in
            each step, the later ones see what the earlier changed. `loss` is then measured and not trained on.
        metric: `metric(model, batch)` -> mean over the batch (float or tensor); None takes the held-out loss, negated.
        evaluate: `evaluate(model, batch)` -> (loss, metric) from one forward; None calls `loss` and `metric`.
        metric_name: what `accuracy` in the study means for this task.
        metric_direction: "maximize" or "minimize" (a metric to minimize is stored negated).
        optimizer: a class such as `torch.optim.AdamW`, or a function from parameters to an optimizer (or to several
            that share the loss); with `losses` also a mapping from the same names to classes or functions. A function
            whose argument is called `model`, or annotated as an `nn.Module`, gets the model, with `losses` the
            submodule: for groups by name, or a rate for each layer.
        optimizer_settings: keyword arguments of a class (lr, weight_decay ...).
        scheduler: `scheduler(optimizer, num_steps)` -> a scheduler stepped after each step that was taken; called for
            each optimizer.
        max_grad_norm: clip the norm of unscaled gradients; None does not clip.
        accumulation_steps: micro-batches to one optimizer step.
        num_samples: samples in a batch; None takes the first dimension of its first tensor.
        num_tokens: tokens in a batch, where throughput is to be told in them too.
        lift_half_parameters: turn trainable FP16 and BF16 parameters into FP32 masters; else they are refused.
        target: the shape of the real run; None takes the longest training batch.
        checkpoint: modules whose activations are computed again in the backward pass: names or globs ("blocks.*").
        channels_last: four-dimensional weights and inputs lie in torch.channels_last.
        tf32: FP32 products, convolutions and recurrent layers in TF32 on CUDA, or not; None leaves torch's switches.
        optimizer_implementation: "foreach", "fused" or "for-loop" of an optimizer class; None leaves torch's choice.
        compile: a backend of torch.compile to train with, such as "inductor"; None trains eagerly.
        settings: what else decides the numbers (data set, sizes ...): part of the study's fingerprint, JSON values.
        source: how another process builds this task; None where it cannot travel. Not set by hand, and not carried
            over by `dataclasses.replace`: the changed task is another one.
    """

    name: str
    model: Callable[[], nn.Module]
    train_batches: Batches
    eval_batches: Batches
    loss: Loss
    losses: Mapping[str, Loss] = field(default_factory=dict)
    metric: Callable[[nn.Module, Batch], torch.Tensor | float] | None = None
    evaluate: Callable[[nn.Module, Batch], tuple[torch.Tensor, torch.Tensor | float]] | None = None
    metric_name: str = "accuracy"
    metric_direction: str = "maximize"
    optimizer: BuildOptimizer | Mapping[str, BuildOptimizer] = torch.optim.AdamW
    optimizer_settings: Mapping[str, Any] = field(default_factory=lambda: {"lr": 1e-3})
    scheduler: Callable[[torch.optim.Optimizer, int], Any] | None = None
    max_grad_norm: float | None = None
    accumulation_steps: int = 1
    num_samples: Callable[[Batch], int] | None = None
    num_tokens: Callable[[Batch], int] | None = None
    lift_half_parameters: bool = False
    target: TargetShape | None = None
    checkpoint: Sequence[str] = ()
    channels_last: bool = False
    tf32: bool | None = None
    optimizer_implementation: str | None = None
    compile: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    source: TaskSource | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        if self.metric_direction not in ("maximize", "minimize"):
            raise TaskError(
                f"task {self.name!r}: metric_direction is {self.metric_direction!r}; allowed: maximize, minimize"
            )
        steps = self.accumulation_steps
        if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
            raise TaskError(f"task {self.name!r}: accumulation_steps is {steps!r}; a whole number from 1 is needed")
        if isinstance(self.optimizer, Mapping) and list(self.optimizer) != list(self.losses):
            raise TaskError(
                f"task {self.name!r}: optimizer is a mapping of {list(self.optimizer)} and losses one of"
                f" {list(self.losses)}; the same names in the same order are needed"
            )
        training_options(self)
        for name in ("train_batches", "eval_batches"):
            batches = getattr(self, name)
            if isinstance(batches, Iterator):
                object.__setattr__(self, name, OneShot(batches))

    @property
    def accuracy_name(self) -> str:
        """What stands behind the study's accuracy: the metric as it is stored, larger where it is better."""
        if self.metric is None and self.evaluate is None:
            return "held-out loss, negated"
        return f"{self.metric_name}, negated" if self.metric_direction == "minimize" else self.metric_name

    @property
    def trained_losses(self) -> list[tuple[int | None, Loss]]:
        """What one training step goes through: the place of the optimizer (None for all of them) and its loss."""
        return list(enumerate(self.losses.values())) if self.losses else [(None, self.loss)]
