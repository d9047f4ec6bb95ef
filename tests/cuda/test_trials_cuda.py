"""Trials on CUDA: measured time and memory, their independence of order, and faults that poison a context."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autoprec.policy import Policy
from autoprec.search.plan import resolve_device, target_of
from autoprec.tasks import Task, TaskSource
from autoprec.trials import InlineWorker, Outcome, TrialSettings, Worker
from autoprec.trials.isolation import RandomState, isolated, seed_everything
from autoprec.trials.target import target_figures

sys.path.insert(0, str(Path(__file__).parents[1] / "trials"))
from small_tasks import small_task

FP32, STOCK = Policy(default="fp32"), Policy(default="autocast", dtype="fp16")
BF16 = Policy(default="autocast", dtype="bf16")
SETTINGS = TrialSettings(device="cuda", warmup_steps=2, measured_steps=4)
FAULTS = Path(__file__).parents[2] / "benchmarks" / "gpu_parts" / "faulty_task.py"


def wide_task() -> Task:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 2))

    return small_task(model=model)


def numbers(outcome: Outcome) -> dict[str, Any]:
    return outcome.model_dump(
        include={"kind", "train_losses", "scale_history", "accuracy", "eval_loss", "peak_memory_bytes"}
    )


def test_memory_and_throughput_are_measured_and_memory_follows_the_precision() -> None:
    figures = {name: target_figures(wide_task(), policy, SETTINGS) for name, policy in (("a", FP32), ("b", STOCK))}
    assert {f.peak_memory_bytes.kind for f in figures.values()} == {"measured"}
    assert {f.throughput_samples_per_second.kind for f in figures.values()} == {"measured"}
    weights = 4 * (2048 * 2048)
    assert figures["a"].peak_memory_bytes.value > 4 * weights  # weights, gradients, two moments


def test_peak_memory_of_a_policy_does_not_depend_on_what_ran_before() -> None:
    worker = InlineWorker(wide_task())
    order = [FP32, STOCK, BF16, FP32, STOCK, BF16, STOCK, BF16, STOCK, FP32]
    peaks = [worker.run(policy, SETTINGS).peak_memory_bytes for policy in order]
    of_fp32 = [peak.value for policy, peak in zip(order, peaks, strict=True) if policy is FP32 and peak is not None]
    assert len(of_fp32) == 3
    assert max(of_fp32) <= 1.01 * min(of_fp32)


def test_a_trial_leaves_no_memory_behind() -> None:
    worker = InlineWorker(wide_task())
    worker.run(FP32, SETTINGS)
    before = torch.cuda.memory_allocated()
    worker.run(STOCK, SETTINGS)
    assert torch.cuda.memory_allocated() == before


@pytest.mark.parametrize(
    ("fault", "kind"), [("out of memory", "out_of_memory"), ("device-side assert", "crashed")], ids=["memory", "assert"]
)
def test_a_fault_is_recorded_and_the_next_trial_is_as_if_alone(fault: str, kind: str) -> None:
    source = TaskSource("function", {"name": f"{FAULTS}:task", "arguments": {"fault": fault}})
    with Worker(source) as worker:
        alone = numbers(worker.run(STOCK, SETTINGS))
        assert alone["kind"] == "ok"
        assert worker.run(BF16, SETTINGS).kind == kind
        assert numbers(worker.run(STOCK, SETTINGS)) == alone


def test_random_states_of_the_devices_are_given_back() -> None:
    torch.cuda.init()
    seed_everything(3)
    expected = torch.rand(2, device="cuda")
    seed_everything(3)
    state = RandomState()
    with isolated():
        seed_everything(4)
        torch.rand(5, device="cuda")
    assert torch.equal(torch.rand(2, device="cuda"), expected)
    state.restore()
    assert torch.equal(torch.rand(2, device="cuda"), expected)


def test_the_device_here_is_the_target_and_is_taken_by_itself() -> None:
    assert resolve_device(None) == "cuda"
    assert target_of(SETTINGS) == (torch.cuda.get_device_name(), True)
