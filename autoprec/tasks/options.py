"""The training options of a task as the value that its policy carries."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, get_args

from pydantic import ValidationError

from autoprec.apply import IMPLEMENTATIONS
from autoprec.errors import TaskError, did_you_mean
from autoprec.policy import OptimizerImplementation, TrainingOptions

if TYPE_CHECKING:
    from autoprec.tasks.protocol import Task

__all__ = ["implementation_settings", "training_options"]

_IMPLEMENTATIONS = get_args(OptimizerImplementation)


def training_options(task: Task) -> TrainingOptions:
    """Return the task's training options.

    Raises:
        TaskError: an option of the wrong type or with a value that is not allowed.
    """
    checkpoint = (task.checkpoint,) if isinstance(task.checkpoint, str) else task.checkpoint
    implementation = task.optimizer_implementation
    if implementation is not None and implementation not in _IMPLEMENTATIONS:
        raise TaskError(
            f"task {task.name!r}: optimizer_implementation is {implementation!r}; allowed: "
            f"{', '.join(_IMPLEMENTATIONS)}{did_you_mean(str(implementation), _IMPLEMENTATIONS)}"
        )
    try:
        return TrainingOptions(
            accumulation_steps=task.accumulation_steps,
            checkpoint=tuple(checkpoint),
            channels_last=task.channels_last,
            tf32=task.tf32,
            optimizer_implementation=implementation,  # type: ignore[arg-type]
            compile=task.compile,
        )
    except (ValidationError, TypeError) as error:
        raise TaskError(f"task {task.name!r}: {_problem(error)}") from None


def implementation_settings(task: Task, optimizer: Any) -> dict[str, Any]:
    """Return the arguments that give one of the task's optimizer classes the implementation that is asked for.

    Raises:
        TaskError: the class has not that implementation, or the optimizer is a function, which chooses it itself.
    """
    name = task.optimizer_implementation
    if name is None:
        return {}
    settings = dict(IMPLEMENTATIONS[name])  # type: ignore[index]
    if not isinstance(optimizer, type):
        (argument,) = settings
        raise TaskError(
            f"task {task.name!r}: optimizer_implementation is {name!r} and the optimizer a function; give"
            f" {argument}={settings[argument]} to the optimizer in it instead"
        )
    accepted = inspect.signature(optimizer).parameters
    missing = [argument for argument in settings if argument not in accepted]
    if missing:
        raise TaskError(f"task {task.name!r}: {optimizer.__name__} has no {name} implementation ({missing[0]}=)")
    return settings


def _problem(error: Exception) -> str:
    if not isinstance(error, ValidationError):
        return f"checkpoint: {error}; a list of module names is needed"
    first = error.errors(include_url=False)[0]
    message = first["msg"].removeprefix("Value error, ")
    return f"{first['loc'][0]} is {first['input']!r}; {message[:1].lower() + message[1:]}"
