"""Identify the code of a task: other code is another study."""

from __future__ import annotations

import functools
import hashlib
import inspect
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from autoprec.tasks.imports import is_installed, with_imports
from autoprec.tasks.protocol import Task

__all__ = ["code_digest"]

_CODE_FIELDS = (
    "model",
    "train_batches",
    "eval_batches",
    "loss",
    "losses",
    "metric",
    "evaluate",
    "optimizer",
    "scheduler",
    "num_samples",
    "num_tokens",
)


def code_digest(task: Task) -> str | None:
    """Hash the code that the task's own functions and classes come from; None where there is none.

    That is the text of their modules' files and of whatever those import, and the values that functions close over.
    Code without a file, as in a notebook, is hashed function by function, with all that it names. Modules of installed
    packages and of Python itself are left out (their versions count), and so are tasks by name, whose settings say
    all; what else decides the numbers belongs into `Task.settings`.
    """
    if task.source is not None and not task.source.is_own:
        return None
    walk = _Walk()
    for part in _parts(task):
        if isinstance(part, Path):
            walk.files.add(part)
        else:
            walk.visit(part)
    texts = walk.texts | {file.read_text(encoding="utf-8", errors="replace") for file in with_imports(walk.files)}
    if not texts:
        return None
    return hashlib.sha256("\0".join(sorted(texts)).encode()).hexdigest()[:16]


def _parts(task: Task) -> Iterable[Any]:
    if task.source is not None and task.source.is_own:
        yield _function_of(task.source.arguments["name"])
    values = [getattr(task, name) for name in _CODE_FIELDS]
    if task.target is not None:
        values += [task.target.make_batch, task.target.model]
    for value in values:
        yield from value.values() if isinstance(value, Mapping) else [value]


def _function_of(name: str) -> Any:
    """Return the module that the source's function is in: it was loaded when the task was built."""
    place = name.rpartition(":")[0]
    known = sys.modules.get(place)
    path = Path(place)
    return path if known is None and path.suffix == ".py" else known


class _Walk:
    """Goes from functions, classes and what they name to files, and to texts where there is no file."""

    def __init__(self) -> None:
        self.files: set[Path] = set()
        self.texts: set[str] = set()
        self._seen: dict[int, Any] = {}

    def visit(self, part: Any, name: str = "") -> None:
        """Note a value and what it refers to; `name` is what the code that refers to it calls it."""
        if isinstance(part, str | int | float | None):
            self.texts |= {f"{name} = {part!r}"} if name else set()
        elif id(part) not in self._seen:
            self._seen[id(part)] = part
            self._visit_object(part, name)

    def _visit_object(self, part: Any, name: str) -> None:
        if isinstance(part, functools.partial):
            self.visit(part.func)
            self._visit_all((*part.args, *part.keywords.values()), f"{name or 'partial'} arguments")
        elif isinstance(part, MethodType):
            self._visit_all((part.__func__, part.__self__), "")
        elif isinstance(part, list | tuple | dict) and name:
            self._visit_all(part.values() if isinstance(part, dict) else part, name)
        else:
            self._visit_code(part if isinstance(part, type | FunctionType | ModuleType) else type(part))

    def _visit_all(self, parts: Iterable[Any], name: str) -> None:
        for place, part in enumerate(parts):
            self.visit(part, f"{name}[{place}]" if name else "")

    def _visit_code(self, owner: Any) -> None:
        module = owner if isinstance(owner, ModuleType) else sys.modules.get(owner.__module__)
        if module is None or _is_installed(module):
            return
        file = getattr(module, "__file__", None)
        path = Path(file) if file is not None and Path(file).is_file() else None
        if path is not None:
            self.files.add(path)
        elif not isinstance(owner, ModuleType):
            self.texts.add(_own_text(owner))
        if isinstance(owner, FunctionType):
            self._visit_held(owner)
        if isinstance(owner, FunctionType) and path is None:
            self._visit_globals(owner)
        if isinstance(owner, type) and path is None:
            self._visit_all((*owner.__bases__, *vars(owner).values()), "")

    def _visit_held(self, function: FunctionType) -> None:
        """Visit what is no text of the function: its defaults and the values that it closes over."""
        self._visit_all(function.__defaults__ or (), f"{function.__qualname__} defaults")
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            if _is_filled(cell):
                self.visit(cell.cell_contents, name)

    def _visit_globals(self, function: FunctionType) -> None:
        for name in sorted(_global_names(function.__code__) & set(function.__globals__)):
            self.visit(function.__globals__[name], name)


def _is_filled(cell: CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:  # a name that is not bound yet
        return False
    return True


def _global_names(code: CodeType) -> set[str]:
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*map(_global_names, inner))


def _own_text(owner: Any) -> str:
    """Return the source of a function or class that has no file (a notebook's); its byte code where that is lost."""
    try:
        return inspect.getsource(owner)
    except (OSError, TypeError):
        return f"{owner.__qualname__} {_byte_code(getattr(owner, '__code__', None))}"


def _byte_code(code: CodeType | None) -> str:
    if code is None:
        return ""
    constants = [_byte_code(c) if isinstance(c, CodeType) else repr(c) for c in code.co_consts]
    return f"{code.co_code.hex()} {code.co_names} {constants}"


def _is_installed(module: ModuleType) -> bool:
    """Whether the module is part of Python, of an installed package or of autoprec itself."""
    if module.__name__.partition(".")[0] in sys.stdlib_module_names:
        return True
    path = getattr(module, "__file__", None)
    if path is None:
        return module.__name__ not in ("__main__", "__mp_main__") and getattr(module, "__spec__", None) is not None
    return is_installed(Path(path))
