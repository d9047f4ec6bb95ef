"""A task described as plain data, so that another process can build it."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.util
import inspect
import random
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autoprec.errors import AutoprecError, TaskError, UsageError, did_you_mean

if TYPE_CHECKING:
    from autoprec.tasks.protocol import Task

__all__ = ["TaskSource", "call_task_function", "explain", "resolve_task", "source_of", "with_source"]


@dataclass(frozen=True, slots=True)
class TaskSource:
    """How to build a task: `TaskSource("vision", {"model": "resnet18"})` or
    `TaskSource("function", {"name": "my.py:task"})`.

    Attributes:
        kind: "named" calls `named_task(**arguments)`, "vision" `vision_task(**arguments)`; "function" calls the
            function that `arguments["name"]` names,
            `path/to/file.py:function` or `package.module:function`, with `arguments["arguments"]` where given.
        arguments: JSON values. They may hold paths: a source is sent to a worker and never written to a file.
        options: fields of the task that are set whatever its builder says (training options); JSON values.
    """

    kind: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)

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
    task = call_task_function(load_function(name), arguments.get("arguments", {}), name=_shown(name))
    return task if task.source is not None else with_source(task, TaskSource("function", dict(arguments)))


def call_task_function(function: Callable[..., Any], arguments: Mapping[str, Any], *, name: str) -> Task:
    """Call the function that makes a task; `name` stands for it in messages.

    It runs under a fixed seed: every process that calls it gets the same data, also where that is drawn at random.

    Raises:
        TaskError: it takes other arguments, raises, or returns no task; chained to the error of its own.
    """
    from autoprec.tasks.protocol import Task

    try:
        inspect.signature(function).bind(**arguments)
    except TypeError as error:
        given = f"with {', '.join(arguments)}" if arguments else "without arguments"
        raise TaskError(f"{name}: it is called {given}, and its signature does not allow that: {error}") from None
    try:
        with _fixed_seed():
            task = function(**arguments)
    except AutoprecError:
        raise
    except (Exception, SystemExit) as error:
        raise TaskError(f"{name} {explain(error)}") from error
    if not isinstance(task, Task):
        raise TaskError(f"{name} returned {type(task).__name__}; an autoprec.Task is needed")
    return task


@contextlib.contextmanager
def _fixed_seed() -> Iterator[None]:
    import numpy as np
    import torch

    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            random.seed(0)
            np.random.seed(0)
            torch.manual_seed(0)
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def resolve_task(task: Task | str | Callable[[], Task]) -> Task:
    """Return the task that is given itself, by name (`path/to/file.py:function`) or as the function that makes it.

    Raises:
        UsageError, TaskError: as `TaskSource.build`; something else was given.
    """
    from autoprec.tasks.protocol import Task

    if isinstance(task, Task):
        return task
    if isinstance(task, str):
        return TaskSource("function", {"name": task}).build()
    if not callable(task):
        raise UsageError(f"the task is {type(task).__name__}; an autoprec.Task, its name or the function is needed")
    source = source_of(task)
    made = call_task_function(task, {}, name=getattr(task, "__qualname__", type(task).__name__))
    return with_source(made, source) if made.source is None and source is not None else made


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
    if type(function).__name__ == "Task":
        raise UsageError(
            f"{_shown(place)}: {function_name!r} is a Task; a function that makes it is needed, since every process"
            " that runs trials makes its own"
        )
    if not callable(function):
        names = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise UsageError(f"{_shown(place)} has no function {function_name!r}{did_you_mean(function_name, names)}")
    return function  # type: ignore[no-any-return]


def _load_file(path: Path) -> Any:
    if not path.is_file():
        beside = [other.name for other in path.parent.glob("*.py")] if path.parent.is_dir() else []
        raise UsageError(f"task file {path.name!r}: there is no such file{did_you_mean(path.name, beside)}")
    name = f"autoprec_task_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"task file {path.name!r} cannot be loaded as a Python module")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    with _first_on_path(str(path.parent.resolve())):
        try:
            spec.loader.exec_module(module)
        except BaseException as error:
            sys.modules.pop(name, None)
            if isinstance(error, KeyboardInterrupt | AutoprecError):
                raise
            raise TaskError(f"task file {path.name} {explain(error)}{_place(error, path)}") from error
    return module


@contextlib.contextmanager
def _first_on_path(folder: str) -> Iterator[None]:
    """Find modules beside the file first while it runs, and last from then on: its functions may import later."""
    known = folder in sys.path
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)
        if not known:
            sys.path.append(folder)


def _place(error: BaseException, path: Path) -> str:
    """Return " (line N)" for the last line of the file that the error passed through."""
    if isinstance(error, SyntaxError):
        return f" (line {error.lineno})"
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if Path(frame.filename).resolve() == path.resolve()]
    return f" (line {lines[-1]})" if lines else ""


def _load_module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name == error.name or name.startswith(error.name + ".")):
            raise TaskError(f"task module {name} {explain(error)}") from error
        raise UsageError(f"task module {name!r}: there is no module {error.name!r}") from None
    except AutoprecError:
        raise
    except (Exception, SystemExit) as error:
        raise TaskError(f"task module {name} {explain(error)}") from error


_PACKAGES = {
    "sklearn": "scikit-learn",
    "PIL": "pillow",
    "cv2": "opencv-python",
    "yaml": "pyyaml",
    "skimage": "scikit-image",
}


def explain(error: BaseException) -> str:
    """Say in one line what the user's code did: "raised KeyError: 'x'"; for a missing module, how to install it."""
    if isinstance(error, ModuleNotFoundError) and error.name:
        top = error.name.partition(".")[0]
        return f"needs the module {error.name!r}, which is not installed: pip install {_PACKAGES.get(top, top)}"
    if isinstance(error, SyntaxError):
        return f"is not Python: {error.msg}"
    text = str(error).strip()
    if text.startswith("Caught ") and " in DataLoader worker process" in text:
        return f"raised {text.splitlines()[-1]} (in a worker process of the DataLoader)"
    return f"raised {type(error).__name__}: {text.splitlines()[0]}" if text else f"raised {type(error).__name__}"


def _shown(place: str) -> str:
    return place.rpartition("/")[2]
