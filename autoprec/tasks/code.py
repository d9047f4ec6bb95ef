"""Identify the code of a task: other code is another study."""

from __future__ import annotations

import functools
import hashlib
import inspect
import sys
import sysconfig
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

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
    """Hash the text of every module that the task's own functions and classes come from; None where there is none.

    Modules of installed packages and of Python itself are left out (their versions count), and so is code that a
    task's module merely imports: what else decides the numbers belongs into `Task.settings`. Code without a file, as
    in a notebook, is hashed function by function.
    """
    found = {text for part in _parts(task) for text in _texts(part)}
    if not found:
        return None
    return hashlib.sha256("\0".join(sorted(found)).encode()).hexdigest()[:16]


def _parts(task: Task) -> Iterable[Any]:
    if task.source is not None and task.source.kind == "function":
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


def _texts(part: Any) -> Iterable[str]:
    if isinstance(part, functools.partial):
        for inner in (part.func, *part.args, *part.keywords.values()):
            yield from _texts(inner)
        return
    if isinstance(part, MethodType):
        yield from _texts(part.__func__)
        yield from _texts(part.__self__)
        return
    if isinstance(part, Path):
        yield part.read_text(encoding="utf-8", errors="replace")
        return
    owner = part if isinstance(part, type | FunctionType | ModuleType) else type(part)
    module = owner if isinstance(owner, ModuleType) else sys.modules.get(owner.__module__)
    if module is None or _is_installed(module):
        return
    text = _module_text(module)
    if text is not None:
        yield text
    elif not isinstance(owner, ModuleType):
        yield _own_text(owner)


def _module_text(module: ModuleType) -> str | None:
    path = getattr(module, "__file__", None)
    if path is None or not Path(path).is_file():
        return None
    return Path(path).read_text(encoding="utf-8", errors="replace")


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


@functools.cache
def _installed_places() -> tuple[Path, ...]:
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    return (Path(__file__).parents[1], *(Path(path).resolve() for path in map(sysconfig.get_path, names) if path))


def _is_installed(module: ModuleType) -> bool:
    """Whether the module is part of Python, of an installed package or of autoprec itself."""
    if module.__name__.partition(".")[0] in sys.stdlib_module_names:
        return True
    path = getattr(module, "__file__", None)
    if path is None:
        return module.__name__ not in ("__main__", "__mp_main__") and getattr(module, "__spec__", None) is not None
    return any(place in Path(path).resolve().parents for place in _installed_places())
