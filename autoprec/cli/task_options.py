"""The options that say what is trained and where, shared by every command that trains; loads nothing heavy."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from autoprec.errors import UsageError

if TYPE_CHECKING:
    from autoprec.tasks.protocol import Task
    from autoprec.trials.outcome import TrialSettings

__all__ = ["TaskOptions", "takes_task"]


def _option(text: str, *names: str) -> Any:
    return typer.Option(*names, help=text, rich_help_panel="Task", show_default=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskOptions:
    """What a person said of the task, of the seed and of the devices; one field an option."""

    task: Annotated[
        str | None, _option("Your own: path/to/file.py:function or package.module:function; it runs.", "--task")
    ] = None
    model: Annotated[str, _option("A torchvision classification model.", "--model")] = "resnet50"
    weights: Annotated[str | None, _option("Start weights: DEFAULT or a file.", "--weights")] = None
    data: Annotated[str, _option("digits, mnist, cifar10:PATH, cifar100:PATH or imagefolder:PATH.", "--data")] = (
        "digits"
    )
    image_size: Annotated[int, _option("Pixels, in the trials.", "--image-size")] = 32
    batch_size: Annotated[int, _option("Batch of the trials.", "--batch-size")] = 32
    optimizer: Annotated[str, _option("adamw, adam or sgd.", "--optimizer")] = "adamw"
    lr: Annotated[float, _option("Learning rate.", "--lr")] = 1e-3
    seed: Annotated[int, _option("Start weights, batch order and samples.", "--seed")] = 0
    device: Annotated[str | None, _option("cpu or cuda; cuda where there is one.", "--device")] = None
    gpu: Annotated[str, _option("Target of computed and predicted numbers.", "--gpu")] = "a100"
    target_image_size: Annotated[int, _option("Pixels of the real run.", "--target-image-size")] = 224
    target_batch_size: Annotated[int, _option("Batch of the real run.", "--target-batch-size")] = 128

    def build_task(self) -> Task:
        """Build the task that the options describe.

        Raises:
            UsageError, TaskError: as the task's own builder.
        """
        from autoprec.tasks.source import TaskSource

        if self.task is not None:
            return TaskSource("function", {"name": self.task}).build()
        given = dataclasses.asdict(self)
        del given["task"], given["device"], given["gpu"]
        return TaskSource("vision", given).build()

    def trial_settings(self) -> TrialSettings:
        """Return seed and devices as the settings of a trial.

        Raises:
            UsageError: no such device or GPU.
        """
        from autoprec.estimates.gpus import gpu_by_name
        from autoprec.search.plan import resolve_device
        from autoprec.trials.outcome import TrialSettings

        return TrialSettings(seed=self.seed, device=resolve_device(self.device), gpu=gpu_by_name(self.gpu).name)


NOT_ONLY_NAMED = ("task", "seed", "device", "gpu")
"""Options that also go with a task of one's own; the others describe one of the tasks by name."""


def _refuse_named_options(context: typer.Context) -> None:
    named = [field.name for field in dataclasses.fields(TaskOptions) if field.name not in NOT_ONLY_NAMED]
    given = [name for name in named if getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"]
    if given:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise UsageError(f"{options}: not with --task, whose function decides this (model, batches, optimizer, target)")


def takes_task(command: Callable[..., None]) -> Callable[..., None]:
    """Let a command, whose first parameter is a `TaskOptions`, take each field of it as an option of its own."""
    hints = get_type_hints(TaskOptions, include_extras=True)
    options = [
        inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=hints[f.name])
        for f in dataclasses.fields(TaskOptions)
    ]
    own_hints = get_type_hints(command, include_extras=True)
    own = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=own_hints[name])
        for name, parameter in list(inspect.signature(command).parameters.items())[1:]
    ]

    @functools.wraps(command)
    def with_task(context: typer.Context, **values: Any) -> None:
        if values["task"] is not None:
            _refuse_named_options(context)
        task = TaskOptions(**{option.name: values.pop(option.name) for option in options})
        command(task, **values)

    context = inspect.Parameter("context", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)
    parameters = [context, *options, *own]
    with_task.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    with_task.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return with_task
