"""The trainings of examples/trainings: each is searched, and its policy trains afterwards."""

from __future__ import annotations

import importlib.util
import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import autoprec
from autoprec.policy import Policy
from autoprec.search.arms import BASELINES
from autoprec.search.measuring import open_measure
from autoprec.search.pipeline import SearchResult, run_search
from autoprec.search.plan import SearchSettings, prepare_search
from autoprec.search.proof import Proof
from autoprec.tasks import Task
from autoprec.tasks.batches import BatchStream
from autoprec.training import TrainingStep
from autoprec.trials.building import build_schedulers, build_task_optimizers
from autoprec.trials.evaluation import estimate_batchnorm, evaluate
from autoprec.trials.outcome import TrialSettings

FOLDER = Path(__file__).parents[2] / "examples" / "trainings"
DOCS = f"text:{FOLDER.parents[1] / 'docs'}"
SMALL: dict[str, dict[str, Any]] = {
    "cnn": {"width": 4, "batch_size": 64},
    "resnet": {"width": 4, "num_stages": 2, "image_size": 8, "batch_size": 64},
    "vit": {"width": 16, "num_layers": 1, "image_size": 16, "batch_size": 64, "target_batch_size": 4},
    "unet": {"width": 4, "num_convolutions": 1, "image_size": 8, "batch_size": 64},
    "gpt": {"data": DOCS, "width": 16, "num_layers": 1, "length": 32, "batch_size": 64},
    "bert": {"data": DOCS, "width": 16, "num_layers": 1, "max_length": 64, "num_topics": 3, "batch_size": 64},
    "lstm": {"width": 8, "batch_size": 90},
    "mlp": {"width": 8, "batch_size": 64},
    "gan": {"width": 4, "batch_size": 64},
    "two_losses": {"width": 8, "batch_size": 64},
    "gnn": {"width": 8, "num_nodes": 32, "num_graphs": 4},
    "state_space": {"width": 4, "num_states": 2, "length": 6, "batch_size": 8},
    "detector": {"width": 4, "num_batches": 5, "batch_size": 8},
    "diffusion": {"width": 4, "image_size": 8, "batch_size": 64},
}


def load(name: str) -> Any:
    if name == "lstm":
        pytest.importorskip("aeon", reason="the extra speech is not installed")
    spec = importlib.util.spec_from_file_location(f"example_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One database for the studies of all trainings."""
    return f"sqlite:///{tmp_path_factory.mktemp('studies') / 'study.db'}"


def search(
    task: Task, folder: Path, storage: str, *, warmup: int, measured: int, proof: Proof, n_trials: int
) -> SearchResult:
    trial = TrialSettings(device="cpu", warmup_steps=warmup, measured_steps=measured, batchnorm_batches=2)
    settings = SearchSettings(n_trials=n_trials, output=folder, proof=proof, storage=storage)
    plan = prepare_search(task, trial=trial, settings=settings)
    with open_measure(task, timeout_seconds=None) as measure:
        return run_search(plan, measure)


def tried(result: SearchResult) -> Policy:
    """Return the first policy of the search's own that it tried, whatever it recommends."""
    return next(record.policy for record in result.records if record.arm not in BASELINES)


def train(task: Task, policy: Policy, *, num_steps: int) -> tuple[list[float], float]:
    """Train the task anew under a policy, in a loop of one's own; return the losses and the held-out metric in FP32."""
    torch.manual_seed(0)
    model = autoprec.apply_policy(task.model().train(), policy)
    optimizers = build_task_optimizers(task, policy, model)
    step = TrainingStep(
        optimizers,
        grad_scaler=autoprec.build_grad_scaler(policy, device="cpu"),
        accumulation_steps=task.accumulation_steps,
        max_grad_norm=task.max_grad_norm,
        schedulers=build_schedulers(task, optimizers, num_steps=num_steps, anneal=True),
    )
    losses = []
    batches = BatchStream(task.train_batches, num_samples=task.num_samples)
    with autoprec.emulate():
        for _ in range(num_steps):
            window = list(itertools.islice(batches, task.accumulation_steps))
            for place, compute_loss in task.trained_losses:
                for batch in window:
                    loss = compute_loss(model, batch)
                    step(loss, optimizer=place)
                    losses.append(float(loss.detach()))
    assert step.num_steps_taken > 0
    with autoprec.suspend_policy(model):
        estimate_batchnorm(model, task, itertools.islice(batches, 8))
        return losses, evaluate(model, task, device=torch.device("cpu")).metric


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")  # torch's own, of its transformer's fast path
@pytest.mark.parametrize("name", SMALL)
def test_each_training_is_searched_and_trains_under_its_policy(name: str, tmp_path: Path, storage: str) -> None:
    task = load(name).task(**SMALL[name])
    proof = Proof(looks=(2,), num_steps=3, margin=0.5)
    result = search(task, tmp_path, storage, warmup=1, measured=2, proof=proof, n_trials=4)
    assert [record.outcome.kind for record in result.records if not record.is_cached] == ["ok"] * 4
    assert all(record.outcome.train_losses for record in result.records)
    policy = autoprec.load_policy(tmp_path / "policy.json")
    losses, metric = train(task, policy, num_steps=3)
    assert all(math.isfinite(value) for value in (*losses, metric))


FULL: dict[str, tuple[dict[str, Any], int, float, float]] = {
    "cnn": ({"width": 8}, 160, 0.93, 0.03),
    "resnet": ({"width": 8, "num_stages": 2, "image_size": 16}, 120, 0.93, 0.03),
    "vit": ({"width": 64, "num_layers": 2, "image_size": 16, "target_batch_size": 32}, 400, 0.9, 0.03),
    "unet": ({"width": 8, "num_convolutions": 1, "image_size": 16}, 80, 0.7, 0.03),
    "gpt": ({"width": 32, "num_layers": 2, "length": 32, "batch_size": 32}, 300, -4.0, 0.1),
    "bert": ({"width": 32, "num_layers": 1, "num_topics": 3, "max_length": 64, "lr": 1e-2}, 200, 0.45, 0.1),
    "lstm": ({"width": 32}, 120, 0.93, 0.03),
    "mlp": ({"width": 32}, 200, 0.93, 0.03),
    "gan": ({"width": 8}, 200, -0.6, 0.1),
    "two_losses": ({"width": 32}, 300, 0.9, 0.03),
    "gnn": ({}, 60, 0.9, 0.03),
    "state_space": ({}, 150, -0.05, 0.05),
}
"""Sizes; steps; what FP32 reaches at least (a metric to minimize is negated); how far the policy may stay behind it.

gpt: the bytes' own frequencies give 4.79 bits. bert: one of three topics, 64 bytes of each sample.
"""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("name", FULL)
def test_trained_to_the_end_the_policy_is_as_good_as_fp32(name: str, tmp_path: Path, storage: str) -> None:
    sizes, num_steps, reached, behind = FULL[name]
    task = load(name).task(**sizes)
    proof = Proof(looks=(2,), num_steps=10, margin=0.5)
    result = search(task, tmp_path, storage, warmup=1, measured=5, proof=proof, n_trials=5)
    _, fp32 = train(task, Policy(default="fp32"), num_steps=num_steps)
    _, recommended = train(task, autoprec.load_policy(tmp_path / "policy.json"), num_steps=num_steps)
    _, own = train(task, tried(result), num_steps=num_steps)
    assert fp32 >= reached
    assert recommended >= fp32 - behind
    assert own >= fp32 - behind
