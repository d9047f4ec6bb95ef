"""A task described as plain data, so that another process can build it."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autoprec.errors import TaskError, UsageError, did_you_mean

if TYPE_CHECKING:
    from autoprec.tasks.protocol import Task

__all__ = ["TaskSource"]


@dataclass(frozen=True, slots=True)
class TaskSource:
    """How to build a task: `TaskSource("vision", {"model": "resnet18"})` or
    `TaskSource("function", {"name": "my.py:task"})`.

    Attributes:
        kind: "vision" calls `vision_task(**arguments)`; "function" calls the function that `arguments["name"]` names,
            `path/to/file.py:function` or `package.module:function`, with `arguments["arguments"]` where given.
        arguments: JSON values. They may hold paths: a source is sent to a worker and never written to a file.
    """

    kind: str
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def build(self) -> Task:
        """Build the task.

        Raises:
            UsageError: an unknown kind, or a name that does not lead to a function.
            TaskError: the function did not return a task.
        """
        if self.kind not in _BUILDERS:
            raise UsageError(f"task source {self.kind!r}; allowed: {', '.join(_BUILDERS)}")
        return _BUILDERS[self.kind](self.arguments)


def _build_vision(arguments: Mapping[str, Any]) -> Task:
    from autoprec.tasks.vision import vision_task

    return vision_task(**arguments)


def _build_from_function(arguments: Mapping[str, Any]) -> Task:
    from autoprec.tasks.protocol import Task

    name = arguments["name"]
    task = load_function(name)(**arguments.get("arguments", {}))
    if not isinstance(task, Task):
        raise TaskError(f"{_shown(name)} returned {type(task).__name__}; an autoprec.Task is needed")
    if task.source is None:
        object.__setattr__(task, "source", TaskSource("function", dict(arguments)))
    return task


_BUILDERS: dict[str, Callable[[Mapping[str, Any]], Task]] = {
    "vision": _build_vision,
    "function": _build_from_function,
}


def load_function(name: str) -> Callable[..., Any]:
    """Load `path/to/file.py:function` or `package.module:function`; the file or module runs.

    Raises:
        UsageError: no such file, module or function.
    """
    place, colon, function_name = name.rpartition(":")
    if not colon or not place or not function_name:
        raise UsageError(f"task {name!r}: path/to/file.py:function or package.module:function is needed")
    module = _load_file(Path(place)) if place.endswith(".py") else _load_module(place)
    function = getattr(module, function_name, None)
    if not callable(function):
        names = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise UsageError(f"{_shown(place)} has no function {function_name!r}{did_you_mean(function_name, names)}")
    return function  # type: ignore[no-any-return]


def _load_file(path: Path) -> Any:
    if not path.is_file():
        raise UsageError(f"task file {path.name!r}: there is no such file")
    name = f"autoprec_task_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"task file {path.name!r} cannot be loaded as a Python module")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, str(path.parent.resolve()))
    try:
        spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    finally:
        sys.path.remove(str(path.parent.resolve()))
    return module


def _load_module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name == error.name or name.startswith(error.name + ".")):
            raise
        raise UsageError(f"task module {name!r}: there is no module {error.name!r}") from None


def _shown(place: str) -> str:
    return place.rpartition("/")[2]
