"""Find and call a function of the user's by name: what it does wrong is one line of text, chained to its own error."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import random
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from autoprec.errors import AutoprecError, TaskError, UsageError, did_you_mean

__all__ = ["call_own", "explain", "fixed_seed", "kept_random_states", "load_function", "shown_name"]


def load_function(name: str) -> Callable[..., Any]:
    """Load `path/to/file.py:function` or `package.module:function`; the file or module runs.

    Raises:
        UsageError: no such file, module or function.
    """
    place, colon, function_name = name.rpartition(":")
    if not colon or not place or not function_name:
        raise UsageError(
            f"task {name!r}: path/to/file.py:function or package.module:function is needed, with lightning: or"
            " trainer: before it for those"
        )
    module = _load_file(Path(place)) if place.endswith(".py") else _load_module(place)
    function = getattr(module, function_name, None)
    if type(function).__name__ == "Task":
        raise UsageError(
            f"{shown_name(place)}: {function_name!r} is a Task; a function that makes it is needed, since every process"
            " that runs trials makes its own"
        )
    if not callable(function):
        names = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise UsageError(f"{shown_name(place)} has no function {function_name!r}{did_you_mean(function_name, names)}")
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


def shown_name(place: str) -> str:
    """Return a name for messages: without the folder, which may be private."""
    return place.rpartition("/")[2]


def call_own(function: Callable[..., Any], arguments: Mapping[str, Any], *, name: str) -> Any:
    """Call a function of the user's; `name` stands for it in messages.

    Raises:
        TaskError: it takes other arguments, or raises; chained to the error of its own.
    """
    try:
        inspect.signature(function).bind(**arguments)
    except TypeError as error:
        given = f"with {', '.join(arguments)}" if arguments else "without arguments"
        raise TaskError(f"{name}: it is called {given}, and its signature does not allow that: {error}") from None
    try:
        return function(**arguments)
    except AutoprecError:
        raise
    except (Exception, SystemExit) as error:
        raise TaskError(f"{name} {explain(error)}") from error


@contextlib.contextmanager
def kept_random_states() -> Iterator[None]:
    """Give Python's, numpy's and torch's random states back as they were."""
    import numpy as np
    import torch

    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


@contextlib.contextmanager
def fixed_seed() -> Iterator[None]:
    """Run the block under one seed, the same in every process, and give the random states back."""
    import numpy as np
    import torch

    with kept_random_states():
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        yield
