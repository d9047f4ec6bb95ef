"""Training code of the shapes that public repositories have is a task of at most forty lines, and trains in half."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import pytest
import real_shapes
import torch

from autoprec.policy import Policy
from autoprec.tasks import Task
from autoprec.trials import TrialSettings, run_trial
from autoprec.trials.checking import check_task
from autoprec.units import find_units

SETTINGS = TrialSettings(warmup_steps=1, measured_steps=2, batchnorm_batches=2)
POLICIES = {
    "fp32": Policy(default="fp32"),
    "autocast": Policy(default="autocast", dtype="fp16"),
    "bf16": Policy(default="bf16"),
}
TASKS: dict[str, Callable[[], Task]] = {
    name: getattr(real_shapes, name) for name in ("nanogpt", "cifar", "unet", "vit", "diffusion", "mamba")
}


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("name", TASKS)
def test_it_is_checked_without_a_note_and_trains_in_each_precision_as_in_fp32(name: str) -> None:
    task = TASKS[name]()
    assert check_task(task, SETTINGS, num_steps=4) == []
    losses = {}
    for arm, policy in POLICIES.items():
        outcome = run_trial(task, policy, SETTINGS)
        assert outcome.is_ok, f"{arm}: {outcome.message}"
        losses[arm] = outcome.train_losses
    assert losses["autocast"] == pytest.approx(losses["fp32"], rel=2e-2)
    assert losses["bf16"] == pytest.approx(losses["fp32"], rel=5e-2)


@pytest.mark.parametrize("name", [*TASKS, "mingpt", "ssdlite"])
def test_its_task_takes_at_most_forty_lines(name: str) -> None:
    assert len(inspect.getsource(getattr(real_shapes, name)).splitlines()) <= 40


def test_layers_inside_a_lambda_are_units_and_follow_the_policy() -> None:
    task = real_shapes.mingpt()
    assert check_task(task, SETTINGS, num_steps=4) == []
    batch = next(iter(task.train_batches))  # type: ignore[arg-type]
    units = find_units(task.model(), lambda model: task.loss(model, batch), try_precisions=False)
    assert {"transformer.h.0.mlp.c_fc", "transformer.h.1.mlp.c_proj"} <= {unit.name for unit in units}


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_detector_is_checked_and_trains_in_bf16() -> None:
    task = real_shapes.ssdlite()
    settings = TrialSettings(warmup_steps=1, measured_steps=1, batchnorm_batches=1)
    check_task(task, settings, num_steps=2)
    fp32, bf16 = (run_trial(task, policy, settings) for policy in (POLICIES["fp32"], Policy(dtype="bf16")))
    assert fp32.is_ok, fp32.message
    assert bf16.is_ok, bf16.message
    assert bf16.train_losses == pytest.approx(fp32.train_losses, rel=0.05)
