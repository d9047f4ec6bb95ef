"""A task described as plain data, so that another process can build it."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autoprec.errors import TaskError, UsageError
from autoprec.tasks.loading import call_own, fixed_seed, load_function, shown_name

if TYPE_CHECKING:
    from autoprec.tasks.protocol import Task

__all__ = ["TaskSource", "call_task_function", "resolve_task", "source_named", "source_of", "with_source"]


@dataclass(frozen=True, slots=True)
class TaskSource:
    """How to build a task: `TaskSource("vision", {"model": "resnet18"})` or
    `TaskSource("function", {"name": "my.py:task"})`.

    Attributes:
        kind: "named" calls `named_task(**arguments)`, "vision" `vision_task(**arguments)`; "function" calls the
            function that `arguments["name"]` names,
            `path/to/file.py:function` or `package.module:function`, with `arguments["arguments"]` where given;
            "lightning" and "trainer" make a task of what such a function returns.
        arguments: JSON values. They may hold paths: a source is sent to a worker and never written to a file.
        options: fields of the task that are set whatever its builder says (training options); JSON values.
    """

    kind: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_own(self) -> bool:
        """Whether the task is a function of the user's, not one by name."""
        return self.kind not in ("named", "vision")

    def build(self) -> Task:
        """Build the task.

        Raises:
            UsageError: an unknown kind, or a name that does not lead to a function.
            TaskError: the function did not return a task.
        """
        if self.kind not in _BUILDERS:
            raise UsageError(f"task source {self.kind!r}; allowed: {', '.join(_BUILDERS)}")
        task = _BUILDERS[self.kind](self.arguments)
        return with_source(dataclasses.replace(task, **self.options), self) if self.options else task


def with_source(task: Task, source: TaskSource) -> Task:
    """Note in the task itself how another process builds it, and return it."""
    object.__setattr__(task, "source", source)
    return task


def _build_named(arguments: Mapping[str, Any]) -> Task:
    from autoprec.tasks.named import named_task

    return named_task(**arguments)


def _build_vision(arguments: Mapping[str, Any]) -> Task:
    from autoprec.tasks.vision import vision_task

    return vision_task(**arguments)


def _build_from_function(arguments: Mapping[str, Any]) -> Task:
    name = arguments["name"]
    task = call_task_function(load_function(name), arguments.get("arguments", {}), name=shown_name(name))
    return task if task.source is not None else with_source(task, TaskSource("function", dict(arguments)))


def _build_from_lightning(arguments: Mapping[str, Any]) -> Task:
    from autoprec.tasks.lightning_modules import lightning_task

    return lightning_task(load_function(arguments["name"]), name=shown_name(arguments["name"]))


def _build_from_trainer(arguments: Mapping[str, Any]) -> Task:
    from autoprec.tasks.transformers_trainer import trainer_task

    return trainer_task(load_function(arguments["name"]), name=shown_name(arguments["name"]))


def _build_from_framework(kind: str, build: Callable[[Mapping[str, Any]], Task], arguments: Mapping[str, Any]) -> Task:
    return with_source(build(arguments), TaskSource(kind, dict(arguments)))


def call_task_function(function: Callable[..., Any], arguments: Mapping[str, Any], *, name: str) -> Task:
    """Call the function that makes a task; `name` stands for it in messages.

    It runs under a fixed seed: every process that calls it gets the same data, also where that is drawn at random.

    Raises:
        TaskError: it takes other arguments, raises, or returns no task; chained to the error of its own.
    """
    from autoprec.tasks.protocol import Task

    with fixed_seed():
        task = call_own(function, arguments, name=name)
    if not isinstance(task, Task):
        raise TaskError(f"{name} returned {type(task).__name__}; an autoprec.Task is needed")
    return task


def resolve_task(task: Task | str | Callable[[], Task]) -> Task:
    """Return the task that is given itself, by name (`path/to/file.py:function`) or as the function that makes it.

    Raises:
        UsageError, TaskError: as `TaskSource.build`; something else was given.
    """
    from autoprec.tasks.protocol import Task

    if isinstance(task, Task):
        return task
    if isinstance(task, str):
        return source_named(task).build()
    if not callable(task):
        raise UsageError(f"the task is {type(task).__name__}; an autoprec.Task, its name or the function is needed")
    source = source_of(task)
    made = call_task_function(task, {}, name=getattr(task, "__qualname__", type(task).__name__))
    return with_source(made, source) if made.source is None and source is not None else made


def source_named(name: str, options: Mapping[str, Any] | None = None) -> TaskSource:
    """Return the source of a task by the name that a person gives it.

    `path/to/file.py:function` or `package.module:function`; before it `lightning:` where the function returns a
    LightningModule and its DataModule, `trainer:` where it returns a Trainer of transformers.
    """
    kind, _, rest = name.partition(":")
    if kind in FRAMEWORKS and ":" in rest:
        return TaskSource(kind, {"name": rest}, options or {})
    return TaskSource("function", {"name": name}, options or {})


def source_of(function: Callable[..., Any]) -> TaskSource | None:
    """Return how another process finds a function; None for one of `__main__`, a notebook, a closure or a method."""
    module = sys.modules.get(getattr(function, "__module__", ""))
    name = getattr(function, "__qualname__", "")
    if module is None or module.__name__ in ("__main__", "__mp_main__") or getattr(module, name, None) is not function:
        return None
    file = getattr(module, "__file__", None)
    if _is_importable(module.__name__, file):
        return TaskSource("function", {"name": f"{module.__name__}:{name}"})
    if file is not None and file.endswith(".py") and not module.__name__.count("."):
        return TaskSource("function", {"name": f"{Path(file).resolve()}:{name}"})
    return None


def _is_importable(module: str, file: str | None) -> bool:
    """Whether an import of the module's name leads to this file, in a process with the same path."""
    top = module.partition(".")[0]
    specs = (finder.find_spec(top, None) for finder in sys.meta_path)
    spec = next((spec for spec in specs if spec is not None), None)
    return spec is not None and (top != module or spec.origin == file)


_BUILDERS: dict[str, Callable[[Mapping[str, Any]], Task]] = {
    "named": _build_named,
    "vision": _build_vision,
    "function": _build_from_function,
    "lightning": functools.partial(_build_from_framework, "lightning", _build_from_lightning),
    "trainer": functools.partial(_build_from_framework, "trainer", _build_from_trainer),
}
FRAMEWORKS = ("lightning", "trainer")
