"""Without its framework a module of the room says how to install it, and nothing else needs one."""

from __future__ import annotations

import importlib
import sys
import types

import pytest

from autoprec.errors import TaskError
from autoprec.tasks.lightning_modules import lightning_task
from autoprec.tasks.transformers_trainer import trainer_task


@pytest.mark.parametrize(
    ("module", "package", "extra"),
    [
        ("lightning", "lightning", "lightning"),
        ("accelerate", "accelerate", "accelerate"),
        ("trainer", "accelerate", "accelerate"),
        ("trainer", "transformers", "hf,accelerate"),
        ("onnx", "onnxscript", "onnx"),
    ],
)
def test_a_missing_framework_is_told_with_its_install_line(
    module: str, package: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if package == "transformers":
        stand_in = types.SimpleNamespace(PolicyAccelerator=None)
        monkeypatch.setitem(sys.modules, "autoprec.integrations.accelerate", stand_in)
    for name in {module, "accelerate"} if package != "transformers" else {module}:
        monkeypatch.delitem(sys.modules, f"autoprec.integrations.{name}", raising=False)
    for name in [package, *(loaded for loaded in sys.modules if loaded.startswith(f"{package}."))]:
        monkeypatch.setitem(sys.modules, name, None)
    told = rf"is not installed; install it with: pip install 'autoprec\[{extra}\]'$"
    with pytest.raises(ImportError, match=told):
        importlib.import_module(f"autoprec.integrations.{module}")


@pytest.mark.parametrize(
    ("build", "package", "extra"),
    [(lightning_task, "lightning", "lightning"), (trainer_task, "transformers", "hf,accelerate")],
)
def test_a_task_of_a_missing_framework_is_told_too(
    build: object, package: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(TaskError, match=rf"mine.py:make: .* is not installed: pip install 'autoprec\[{extra}\]'"):
        build(lambda: None, name="mine.py:make")  # type: ignore[operator]
