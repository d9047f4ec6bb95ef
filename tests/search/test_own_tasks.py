"""Tasks of a user's own, searched from a file, a function, a script and a notebook."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autoprec import search_policy
from autoprec.errors import TaskError
from autoprec.policy import load_policy
from autoprec.search import SearchSettings, prepare_search
from autoprec.search.proof import Proof
from autoprec.tasks import Task
from autoprec.tasks.source import resolve_task
from autoprec.trials import TrialSettings

TASK = """
import torch
from torch import nn
import autoprec

def batches(seed):
    x = torch.randn(3, 8, 4, generator=torch.Generator().manual_seed(seed))
    return [(each, (each.sum(1) > 0).long()) for each in x]

def loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])

def task():
    return autoprec.Task(
        name="own", model=lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), loss=loss,
        train_batches=batches(0), eval_batches=batches(1),
    )
"""
SHORT: dict[str, Any] = {"n_trials": 3, "proof": Proof(looks=(2,), num_steps=9)}


README = Path(__file__).parents[2] / "README.md"


@pytest.fixture
def readme_task(tmp_path: Path) -> Path:
    """The shortest own task, as the README shows it."""
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    (text,) = [block for block in blocks if "def task():" in block]
    assert len([line for line in text.splitlines() if line.strip()]) <= 10
    path = tmp_path / "mine.py"
    path.write_text(text)
    return path


@pytest.fixture
def task_file(tmp_path: Path) -> Path:
    path = tmp_path / "own_task.py"
    path.write_text(TASK)
    return path


def test_the_shortest_own_task_gives_policy_front_and_study(readme_task: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    result = search_policy(f"{readme_task}:task", output=folder, **SHORT)  # a warning would be an error: it travels
    assert result.folder == folder
    written = load_policy(folder / "policy.json")
    assert result.policy.to_json() == written.to_json()
    assert result.recommendation == written.recommendation
    assert {record.arm for record in result.records} >= {"fp32", "autocast bf16"}
    assert {record.number for record in result.front} <= {trial.number for trial in result.study.trials}
    assert len(result.front) >= 1
    assert result.study.study_name == result.plan.study_name
    assert result.plan.study_name.startswith("mine-")


def test_other_code_is_another_study(task_file: Path) -> None:
    def name() -> str:
        task = resolve_task(f"{task_file}:task")
        return prepare_search(task, trial=TrialSettings(), settings=SearchSettings()).study_name

    first = name()
    assert name() == first
    task_file.write_text(TASK.replace("nn.ReLU()", "nn.Tanh()"))
    assert name() != first


def test_a_wrong_task_is_an_error_before_anything_is_written(task_file: Path, tmp_path: Path) -> None:
    task_file.write_text(TASK.replace("loss=loss", "loss=lambda model, batch: 0.5"))
    with pytest.raises(TaskError, match=r"task 'own': loss\(model, batch\) returned 0.5; one floating number"):
        search_policy(f"{task_file}:task", output=tmp_path / "out", **SHORT)
    assert not (tmp_path / "out").exists()


def half_with_one_sample_first() -> Task:
    x = torch.randn(17, 4)
    batches = [(each, (each.sum(1) > 0).long()) for each in x.split([1, 8, 8])]

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8).half(), nn.BatchNorm1d(8), nn.Linear(8, 2))

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    return Task(
        name="t", model=build, train_batches=batches, eval_batches=batches, loss=loss, lift_half_parameters=True
    )


def test_a_plan_lifts_half_parameters_and_leaves_a_first_batch_of_one_sample_out() -> None:
    plan = prepare_search(half_with_one_sample_first(), trial=TrialSettings(), settings=SearchSettings())
    assert {"0", "2"} <= {decision.name for decision in plan.decisions}
    assert "a training batch of one sample was left out: normalisation needs at least two" in plan.notes


SEARCH = """
from autoprec.search.proof import Proof
result = autoprec.search_policy(task, output={folder!r}, n_trials=3, proof=Proof(looks=(2,), num_steps=9))
print("runs once:", result.recommendation.choice)
"""


@pytest.mark.parametrize("guarded", [pytest.param(True, marks=pytest.mark.slow), False], ids=["guarded", "unguarded"])
def test_a_script_searches_the_task_that_it_defines(tmp_path: Path, guarded: bool) -> None:
    search = SEARCH.format(folder=str(tmp_path / "out"))
    if guarded:
        search = "if __name__ == '__main__':\n" + textwrap.indent(search, "    ")
    script = tmp_path / "script.py"
    script.write_text(TASK + search)
    ended = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("runs once:") == 1
    assert "PrecisionWarning: the trials run in this process" in ended.stderr
    assert (tmp_path / "out" / "policy.json").exists()
