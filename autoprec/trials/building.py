"""The parts of one training under a policy: the bare model, the optimizer and the schedule."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from autoprec.apply import build_optimizer, checkpoint_modules
from autoprec.apply.optimizers import takes_value
from autoprec.errors import ApplyError, TaskError, did_you_mean
from autoprec.policy import Policy
from autoprec.tasks.batches import map_tensors, move_batch, open_batches
from autoprec.tasks.options import implementation_settings, training_options
from autoprec.tasks.protocol import Batch, Task, takes_model
from autoprec.training import low_precision_parameters, needs_closure

__all__ = [
    "build_model",
    "build_task_optimizers",
    "build_schedulers",
    "first_call",
    "lift_half_parameters",
    "perturb_weights",
    "prepare_batch",
]


def build_model(task: Task, device: torch.device, *, build: Callable[[], nn.Module] | None = None) -> nn.Module:
    """Build the task's bare model on `device`, in training mode; lazy modules get their shapes from one batch.

    It has the memory format and the checkpointed modules that the task asks for.

    Raises:
        TaskError: the task did not build a module, nothing in it can be trained, or a name in `checkpoint` matches
            nothing.
    """
    model = (build or task.model)()
    if not isinstance(model, nn.Module):
        raise TaskError(f"task {task.name!r}: model() returned {type(model).__name__}; an nn.Module is needed")
    model.to(device)
    if any(is_lazy(parameter) for parameter in (*model.parameters(), *model.buffers())):
        _materialise(model, task, device)
    if task.lift_half_parameters:
        lift_half_parameters(model)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise TaskError(f"task {task.name!r}: no parameter of {type(model).__name__} is trainable (all are frozen)")
    if task.channels_last:
        model.to(memory_format=torch.channels_last)
    try:
        checkpoint_modules(model, training_options(task).checkpoint)
    except ApplyError as error:
        raise TaskError(f"task {task.name!r}: {error}") from None
    return model.train()


def first_call(task: Task, model: nn.Module) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments that the task's loss calls the model with on its first batch: positional, and by name.

    Raises:
        TaskError: the loss does not call the model.
    """
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.append((args, kwargs))

    batch = next(open_batches(task.train_batches, name="train_batches"))
    was_training = model.training
    handle = model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        with torch.no_grad():
            task.loss(model.eval(), prepare_batch(task, batch, next(model.parameters()).device))
    finally:
        handle.remove()
        model.train(was_training)
    if not calls:
        raise TaskError(f"task {task.name!r}: its loss does not call the model")
    return calls[0]


def lift_half_parameters(model: nn.Module) -> None:
    """Turn trainable FP16 and BF16 parameters into FP32 masters, in place."""
    half = low_precision_parameters(model)
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.float() if name in half else parameter.data


def prepare_batch(task: Task, batch: Batch, device: torch.device) -> Batch:
    """Return the batch on `device`, its images (four dimensions, floating) in channels_last where the task asks."""
    moved = move_batch(batch, device)
    if not task.channels_last:
        return moved

    def convert(tensor: torch.Tensor) -> torch.Tensor:
        is_image = tensor.dim() == 4 and tensor.is_floating_point()
        return tensor.contiguous(memory_format=torch.channels_last) if is_image else tensor

    return map_tensors(convert, moved)


def _materialise(model: nn.Module, task: Task, device: torch.device) -> None:
    model.eval()
    for batch in open_batches(task.train_batches, name="train_batches"):
        with torch.no_grad():
            task.loss(model, move_batch(batch, device))
        return


def perturb_weights(model: nn.Module, perturbation: float, *, seed: int) -> None:
    """Multiply each trainable weight by 1 + up to `perturbation`, at random; the global random state is not used."""
    if not perturbation:
        return
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad and parameter.is_floating_point():
                noise = torch.rand(parameter.shape, generator=generator).mul_(2).sub_(1).mul_(perturbation)
                parameter.mul_(noise.add_(1).to(parameter.device))


def build_task_optimizers(task: Task, policy: Policy, model: nn.Module) -> list[torch.optim.Optimizer]:
    """Build the task's optimizers with the policy's eps and amsgrad: one for each of `task.losses` where it has those.

    A class gets the task's settings; a function gets the parameters, or the model, and its groups the policy's values.

    Raises:
        TaskError: a function returned something else than optimizers, one needs a closure (LBFGS), or `losses` names a
            submodule that is not there.
    """
    if not task.losses:
        return _build_optimizers(task, policy, task.optimizer, model)
    optimizers = []
    for name in task.losses:
        build = task.optimizer[name] if isinstance(task.optimizer, Mapping) else task.optimizer
        built = _build_optimizers(task, policy, build, _submodule(task, model, name))
        if len(built) != 1:
            raise TaskError(
                f"task {task.name!r}: optimizer() returned {len(built)} optimizers for {name!r}; one is needed"
            )
        optimizers += built
    return optimizers


def _submodule(task: Task, model: nn.Module, name: str) -> nn.Module:
    try:
        return model.get_submodule(name)
    except AttributeError:
        names = [known for known, _ in model.named_modules() if known]
        raise TaskError(
            f"task {task.name!r}: losses names {name!r}, and {type(model).__name__} has no such submodule"
            f"{did_you_mean(name, names)}"
        ) from None


def _build_optimizers(task: Task, policy: Policy, build: Any, model: nn.Module) -> list[torch.optim.Optimizer]:
    if isinstance(build, type):
        kind = cast("type[torch.optim.Optimizer]", build)
        settings = {**task.optimizer_settings, **implementation_settings(task, build)}
        optimizers = [build_optimizer(policy, kind, list(model.parameters()), **settings)]
    else:
        implementation_settings(task, build)
        built = build(model if takes_model(build) else list(model.parameters()))
        optimizers = list(built) if isinstance(built, list | tuple) else [built]
        if not optimizers or not all(isinstance(optimizer, torch.optim.Optimizer) for optimizer in optimizers):
            what = "nothing" if not optimizers else type(optimizers[0]).__name__
            raise TaskError(f"task {task.name!r}: optimizer() returned {what}; a torch.optim.Optimizer is needed")
        for optimizer in optimizers:
            _set_choices(optimizer, policy)
    for optimizer in optimizers:
        _refuse_closure(task, optimizer)
    return optimizers


def _set_choices(optimizer: torch.optim.Optimizer, policy: Policy) -> None:
    chosen = {} if policy.optimizer is None else {"eps": policy.optimizer.eps, "amsgrad": policy.optimizer.amsgrad}
    for group in optimizer.param_groups:
        given = {key: value for key, value in chosen.items() if value is not None and key in group}
        group.update({key: value for key, value in given.items() if takes_value(group[key], value)})


def _refuse_closure(task: Task, optimizer: torch.optim.Optimizer) -> None:
    if needs_closure(optimizer):
        raise TaskError(
            f"task {task.name!r}: {type(optimizer).__name__} evaluates the loss in a closure as often as it likes: no"
            " grad scaler supports that, and its step has no one memory and time to compare; use another optimizer (a"
            " BF16 policy of your own trains with TrainingStep.run_closure)"
        )


def build_schedulers(
    task: Task, optimizers: Sequence[torch.optim.Optimizer], *, num_steps: int, anneal: bool
) -> list[Any]:
    """Return a scheduler for each optimizer: the task's, else where asked a cosine that ends at zero, else none."""
    if task.scheduler is not None:
        return [task.scheduler(optimizer, num_steps) for optimizer in optimizers]
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR
    return [cosine(optimizer, T_max=num_steps) for optimizer in optimizers] if anneal else []
