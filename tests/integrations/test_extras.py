"""Without its framework a module of the room says how to install it, and nothing else needs one."""

from __future__ import annotations

import subprocess
import sys

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
def test_a_missing_framework_is_told_with_its_install_line(module: str, package: str, extra: str) -> None:
    accelerate_is_there = (
        "sys.modules['autoprec.integrations.accelerate'] = types.SimpleNamespace(PolicyAccelerator=None)"
    )
    code = (
        "import sys, types\n"
        f"sys.modules[{package!r}] = None\n"
        f"{accelerate_is_there if package == 'transformers' else ''}\n"
        f"import autoprec.integrations.{module}\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 1
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: ")
    assert last.endswith(f"is not installed; install it with: pip install 'autoprec[{extra}]'")


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
