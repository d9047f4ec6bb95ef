"""Imports point one way, heavy packages stay in their rooms, and the public half starts light."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import autoprec

PACKAGE = Path(autoprec.__file__).parent

ORDER = [
    "errors",
    "formats",
    "policy",
    "emulation",
    "apply",
    "units",
    "probes",
    "training",
    "guard",
    "tasks",
    "estimates",
    "trials",
    "profiling",
    "doctor",
    "search",
    "report",
    "engines",
    "integrations",
    "cli",
]
"""Each room may import those before it, and itself."""

ALLOWED_IN = {
    "optuna": {"search", "report", "engines"},
    "torchvision": {"tasks"},
    "typer": {"cli"},
    "rich": {"report", "cli"},
    "sklearn": {"tasks"},
    "mlxtend": {"tasks"},
    "aeon": {"tasks"},
    "timm": {"tasks"},
    "transformers": {"tasks", "integrations"},
    "lightning": {"tasks", "integrations"},
    "accelerate": {"integrations"},
    "onnx_ir": {"integrations"},
    "onnxscript": {"integrations"},
    "plotly": {"report"},
    "jinja2": {"report"},
    "kaleido": {"report"},
    "optuna_dashboard": {"report"},
    "submitit": {"engines"},
    "ray": {"engines"},
}


def _room(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return parts[0]


def _imports(path: Path) -> list[str]:
    tree = ast.parse(path.read_text())
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names.append(node.module)
    return names


TOP = {PACKAGE / "__init__.py", PACKAGE / "__main__.py"}
FILES = sorted(path for path in PACKAGE.rglob("*.py") if path not in TOP)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_room_imports_only_rooms_before_it(path: Path) -> None:
    room = _room(path)
    assert room in ORDER, f"{room} has no place in the order of rooms"
    later = [
        name
        for name in _imports(path)
        if name.startswith("autoprec.") and ORDER.index(name.split(".")[1]) > ORDER.index(room)
    ]
    assert later == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_heavy_package_is_imported_only_in_its_rooms(path: Path) -> None:
    roots = {name.split(".")[0] for name in _imports(path)}
    misplaced = [name for name in roots & set(ALLOWED_IN) if _room(path) not in ALLOWED_IN[name]]
    assert misplaced == []


@pytest.mark.parametrize("room", ["errors", "formats", "policy"])
def test_a_policy_can_be_read_without_torch(room: str) -> None:
    assert "torch" not in _loaded_by(f"import autoprec.{room}")


def test_import_autoprec_loads_neither_optuna_nor_torchvision_nor_the_compiler() -> None:
    names = "Policy, load_policy, apply_policy, remove_policy, build_optimizer, build_grad_scaler, emulate"
    loaded = _loaded_by(f"from autoprec import {names}; import autoprec.training")
    assert not loaded & {"optuna", "torchvision", "sklearn", "torch._dynamo"}


def test_there_are_at_most_fifteen_public_names_and_each_resolves() -> None:
    assert len(autoprec.__all__) <= 15
    for name in autoprec.__all__:
        assert getattr(autoprec, name) is not None


def _loaded_by(statement: str) -> set[str]:
    code = f"import sys; {statement}; print(' '.join(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    names = result.stdout.split()
    return {name.split(".")[0] for name in names} | set(names)
