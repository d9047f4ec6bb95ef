"""A task as plain data: built by name, from a file or a module, in any process."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from autoprec.errors import TaskError, UsageError
from autoprec.tasks import Task, TaskSource

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
        ("no_such_package.tasks:f", "there is no module 'no_such_package'"),
    ],
    ids=["function", "no function", "file", "module"],
)
def test_a_wrong_name_says_what_is_there(task_file: Path, name: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        TaskSource("function", {"name": name.format(file=task_file)}).build()


def test_a_function_that_returns_no_task_says_what_it_returned(task_file: Path) -> None:
    with pytest.raises(TaskError, match=r"my_task\.py:nothing returned int"):
        TaskSource("function", {"name": f"{task_file}:nothing"}).build()


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(UsageError, match="task source 'visoin'; allowed: vision, function"):
        TaskSource("visoin").build()
