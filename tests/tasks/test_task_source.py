"""A task as plain data: built by name, from a file or a module, in any process."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import pickle
import random
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from autoprec.errors import TaskError, UsageError
from autoprec.tasks import Task, TaskSource
from autoprec.tasks.code import code_digest
from autoprec.tasks.loading import explain
from autoprec.tasks.source import resolve_task, source_of

FILE = """
from autoprec.tasks import Task

def make_task(size=3):
    return Task(name=f"made-{size}", model=None, train_batches=[], eval_batches=[], loss=None)

def nothing():
    return 5
"""


@pytest.fixture
def task_file(tmp_path: Path) -> Path:
    path = tmp_path / "my_task.py"
    path.write_text(FILE)
    return path


def test_a_source_is_plain_data_that_travels(task_file: Path) -> None:
    source = TaskSource("function", {"name": f"{task_file}:make_task", "arguments": {"size": 7}})
    task = pickle.loads(pickle.dumps(source)).build()
    assert isinstance(task, Task)
    assert task.name == "made-7"


def test_a_task_from_a_file_knows_its_source(task_file: Path) -> None:
    task = TaskSource("function", {"name": f"{task_file}:make_task"}).build()
    assert task.source is not None
    assert task.source.build().name == "made-3"


def test_a_task_from_a_module() -> None:
    task = TaskSource("function", {"name": "autoprec.tasks.vision:vision_task", "arguments": {"model": "resnet18"}})
    assert task.build().name == "resnet18"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("{file}:make_tusk", "has no function 'make_tusk'; nearest: make_task"),
        ("{file}", "path/to/file.py:function"),
        ("missing.py:f", "there is no such file"),
        ("{folder}/my_tusk.py:f", "there is no such file; nearest: my_task.py"),
        ("no_such_package.tasks:f", "there is no module 'no_such_package'"),
    ],
    ids=["function", "no function", "file", "nearest file", "module"],
)
def test_a_wrong_name_says_what_is_there(task_file: Path, name: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        TaskSource("function", {"name": name.format(file=task_file, folder=task_file.parent)}).build()


def test_a_function_that_returns_no_task_says_what_it_returned(task_file: Path) -> None:
    with pytest.raises(TaskError, match=r"my_task\.py:nothing returned int"):
        TaskSource("function", {"name": f"{task_file}:nothing"}).build()


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(UsageError, match="task source 'visoin'; allowed: named, vision, function"):
        TaskSource("visoin").build()


BROKEN = {
    "not Python": ("def task(:\n    pass\n", r"task file broken\.py is not Python: .* \(line 1\)"),
    "a missing extra": (
        "import aeonn.datasets\n",
        r"broken\.py needs the module 'aeonn', .* pip install aeonn \(line 1\)",
    ),
    "a package by another name": ("import sklearn_\n", "needs the module 'sklearn_', which is not installed"),
    "raises": ("x = 1\ny = x / 0\n", r"task file broken\.py raised ZeroDivisionError: division by zero \(line 2\)"),
    "exits": ("import sys\nsys.exit(3)\n", r"task file broken\.py raised SystemExit: 3 \(line 2\)"),
    "wants an argument": ("def task(size):\n    pass\n", r"broken\.py:task: it is called without arguments, .*'size'"),
    "the function raises": (
        "def task():\n    raise OSError('no such disk')\n",
        r"broken\.py:task raised OSError: no such disk",
    ),
    "the function exits": ("def task():\n    raise SystemExit(3)\n", r"broken\.py:task raised SystemExit: 3"),
    "a task, no function": (
        "import autoprec\ntask = autoprec.Task(name='t', model=None, train_batches=[], eval_batches=[], loss=None)\n",
        r"broken\.py: 'task' is a Task; a function that makes it is needed",
    ),
}


@pytest.mark.parametrize(("text", "words"), BROKEN.values(), ids=BROKEN)
def test_a_broken_file_is_one_line_that_says_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("broken.py").write_text(text)
    with pytest.raises((TaskError, UsageError), match=words) as raised:
        TaskSource("function", {"name": "broken.py:task"}).build()
    assert "\n" not in str(raised.value)
    assert str(tmp_path) not in str(raised.value)


def test_of_an_error_in_a_worker_process_of_a_loader_the_error_itself_is_told() -> None:
    text = "Caught OSError in DataLoader worker process 0.\nOriginal Traceback:\n  File x\nOSError: no disk"
    assert explain(OSError(text)) == "raised OSError: no disk (in a worker process of the DataLoader)"


def test_the_users_own_error_is_the_cause(tmp_path: Path) -> None:
    path = tmp_path / "broken.py"
    path.write_text("1 / 0")
    with pytest.raises(TaskError) as raised:
        TaskSource("function", {"name": f"{path}:task"}).build()
    assert isinstance(raised.value.__cause__, ZeroDivisionError)


def test_modules_beside_the_file_are_found_also_when_they_are_imported_later(tmp_path: Path) -> None:
    (tmp_path / "beside_the_task.py").write_text("NAME = 'beside'")
    (tmp_path / "later_than_the_task.py").write_text("NAME = 'later'")
    (tmp_path / "mine.py").write_text(
        "import beside_the_task\nfrom autoprec.tasks import Task\n"
        "def task():\n    import later_than_the_task\n"
        "    name = beside_the_task.NAME + later_than_the_task.NAME\n"
        "    return Task(name=name, model=None, train_batches=[], eval_batches=[], loss=None)\n"
    )
    before = list(sys.path)
    try:
        assert TaskSource("function", {"name": f"{tmp_path / 'mine.py'}:task"}).build().name == "besidelater"
    finally:
        sys.path[:] = before


def a_task() -> Task:
    return Task(name="here", model=None, train_batches=[], eval_batches=[], loss=None)  # type: ignore[arg-type]


def test_a_function_of_a_module_travels_and_a_closure_or_a_script_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def closure() -> Task:
        return a_task()

    travelling = resolve_task(a_task)
    assert travelling.source is not None
    assert travelling.source.build().name == "here"
    assert resolve_task(closure).source is None
    assert resolve_task(lambda: a_task()).source is None
    monkeypatch.setattr(a_task, "__module__", "__main__")
    assert source_of(a_task) is None
    task = a_task()
    assert resolve_task(task) is task


def test_a_function_of_a_package_travels_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_package").mkdir()
    (tmp_path / "own_package" / "__init__.py").write_text("")
    (tmp_path / "own_package" / "tasks.py").write_text(FILE)
    monkeypatch.syspath_prepend(str(tmp_path))
    source = source_of(importlib.import_module("own_package.tasks").make_task)
    assert source == TaskSource("function", {"name": "own_package.tasks:make_task"})
    assert resolve_task("own_package.tasks:make_task").name == "made-3"


REPLACING = """
import dataclasses
from autoprec.tasks import vision_task
def changed():
    return dataclasses.replace(vision_task("resnet18", batch_size=8), max_grad_norm=0.5)
def whole():
    return vision_task("resnet18", batch_size=8)
"""


def test_a_task_by_name_that_was_changed_travels_with_its_change(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(REPLACING)
    changed, whole = (resolve_task(f"{tmp_path / 'mine.py'}:{name}") for name in ("changed", "whole"))
    assert changed.source is not None
    assert changed.source.build().max_grad_norm == 0.5
    assert code_digest(changed) is not None
    assert whole.source is not None
    assert (whole.source.kind, whole.source.arguments["batch_size"]) == ("vision", 8)
    assert dataclasses.replace(whole, max_grad_norm=0.5).source is None


@pytest.mark.parametrize("given", [5, None], ids=str)
def test_what_is_no_task_is_refused(given: object) -> None:
    with pytest.raises(UsageError, match=r"an autoprec\.Task, its name or the function is needed"):
        resolve_task(given)  # type: ignore[arg-type]


def test_other_code_is_another_digest(task_file: Path) -> None:
    def digest() -> str | None:
        return code_digest(TaskSource("function", {"name": f"{task_file}:make_task"}).build())

    first = digest()
    assert first is not None
    assert digest() == first
    task_file.write_text(FILE + "\n# another line\n")
    assert digest() != first


IMPORTING = """
import json, sys
from autoprec.tasks import Task
import helper
def make_task():
    from parts.late import build
    return Task(name="t", model=build, train_batches=[], eval_batches=[], loss=helper.loss)
"""


@pytest.mark.parametrize(
    ("changed", "is_another"),
    [
        ("helper.py", True),
        ("deeper.py", True),
        ("parts/__init__.py", True),
        ("parts/late.py", True),
        ("parts/beside.py", True),
        ("stranger.py", False),
    ],
)
def test_what_a_task_file_imports_from_its_folder_is_part_of_the_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: str, is_another: bool
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    files = {
        "mine.py": IMPORTING,
        "helper.py": "import deeper, numpy\ndef loss(model, batch): return deeper.half(model(batch))",
        "deeper.py": "import helper\ndef half(x): return x / 2",
        "parts/__init__.py": "",
        "parts/late.py": "from . import beside\nfrom .beside import nothing\nbuild = dict",
        "parts/beside.py": "nothing = None",
        "stranger.py": "",
    }
    (tmp_path / "parts").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text)

    def digest() -> str | None:
        for name in ("helper", "deeper", "parts", "parts.late", "parts.beside"):
            monkeypatch.delitem(sys.modules, name, raising=False)
        return code_digest(resolve_task(f"{tmp_path / 'mine.py'}:make_task"))

    first = digest()
    assert digest() == first
    (tmp_path / changed).write_text(files[changed] + "\n# changed")
    assert (digest() != first) is is_another


NOTEBOOK = """
import math
WIDTH = 8
SIZES = [1, 2]
class Net:
    def __init__(self, width, depth): self.sizes = SIZES
def mean(x): return x / WIDTH
def make_task(depth=2):
    width = 3
    def loss(model, batch, scale=1.0): return mean(math.sqrt(width)) * scale
    return Task(name="t", model=lambda: Net(width, depth), train_batches=[], eval_batches=[], loss=loss)
"""


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("WIDTH = 8", "WIDTH = 9"),
        ("[1, 2]", "[1, 3]"),
        ("self.sizes = SIZES", "self.sizes = SIZES, 1"),
        ("x / WIDTH", "x * WIDTH"),
        ("width = 3", "width = 4"),
        ("depth=2", "depth=3"),
        ("scale=1.0", "scale=2.0"),
        ("* scale", "+ scale"),
    ],
)
def test_code_without_a_file_is_told_apart_by_all_that_it_names(
    monkeypatch: pytest.MonkeyPatch, old: str, new: str
) -> None:
    monkeypatch.setitem(sys.modules, "a_notebook", ModuleType("a_notebook"))

    def digest(text: str) -> str | None:
        names: dict[str, Any] = {"__name__": "a_notebook", "Task": Task}
        exec(text, names)
        return code_digest(names["make_task"]())

    assert old in NOTEBOOK
    first = digest(NOTEBOOK)
    assert digest(NOTEBOOK + "UNUSED = 1\n") == first is not None
    assert digest(NOTEBOOK.replace(old, new)) != first


def test_tasks_of_one_function_are_told_apart_by_what_they_close_over() -> None:
    def digest(smoothing: float, width: int) -> str | None:
        def loss(model: Any, batch: Any) -> Any:
            return smoothing

        build = functools.partial(dict, width=width)
        return code_digest(Task(name="t", model=build, train_batches=[], eval_batches=[], loss=loss))  # type: ignore[arg-type]

    assert digest(0.1, 8) == digest(0.1, 8)
    assert len({digest(0.1, 8), digest(0.2, 8), digest(0.1, 9)}) == 3


def test_a_task_by_name_and_installed_code_have_no_digest() -> None:
    assert code_digest(TaskSource("vision", {"model": "resnet18"}).build()) is None
    assert code_digest(Task(name="t", model=dict, train_batches=[], eval_batches=[], loss=len)) is None  # type: ignore[arg-type]


def test_every_process_gets_the_same_data_and_the_random_states_are_left_alone() -> None:
    def drawing() -> Task:
        data = [torch.rand(1).item(), float(np.random.rand()), random.random()]
        return Task(name="t", model=dict, train_batches=data, eval_batches=[], loss=len)  # type: ignore[arg-type]

    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    first = resolve_task(drawing).train_batches
    assert torch.equal(torch.rand(1), expected)
    random.random()
    np.random.rand()
    assert resolve_task(drawing).train_batches == first
