"""Whatever a task leaves behind in its process, the next trial's numbers are those of a trial alone."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from left_modes import MODES
from small_tasks import build, comparable

from autoprec.policy import Policy
from autoprec.tasks import TaskSource
from autoprec.trials import InlineWorker, TrialSettings, Worker
from autoprec.trials.isolation import modes_left

FP32, BF16 = Policy(default="fp32"), Policy(default="autocast", dtype="bf16")
SHORT = TrialSettings(warmup_steps=1, measured_steps=2, batchnorm_batches=1, emulate=False)
FILE = Path(__file__).with_name("small_tasks.py")
KEEPS_WHAT_IT_CHANGES = ["linear", "AdamW.step", "forward hook", "saved tensors hooks", "inference mode", "a timer"]


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return comparable(InlineWorker(build()).run(FP32, SHORT))


@pytest.fixture(autouse=True)
def signals_of_before() -> Iterator[None]:
    """What no trial can be asked to put back here is put back: handlers of signals that the tests themselves use."""
    before = {number: signal.getsignal(number) for number in (signal.SIGUSR2, signal.SIGALRM, signal.SIGPROF)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_the_list_is_long_enough() -> None:
    assert len(MODES) >= 82


@pytest.mark.parametrize("name", MODES)
def test_the_next_trial_is_as_one_alone(name: str, alone: dict[str, Any]) -> None:
    InlineWorker(build(f"mode:{name}")).run(BF16, SHORT)
    assert comparable(InlineWorker(build()).run(FP32, SHORT)) == alone


def worker(fault: str) -> Worker:
    source = TaskSource("function", {"name": f"{FILE}:build", "arguments": {"fault": fault}})
    return Worker(source, num_threads=torch.get_num_threads())


@pytest.mark.parametrize(
    "name",
    [name if name in KEEPS_WHAT_IT_CHANGES[:2] else pytest.param(name, marks=pytest.mark.slow) for name in MODES],
)
def test_the_next_trial_of_a_worker_is_as_one_alone(name: str, alone: dict[str, Any]) -> None:
    with worker(f"mode:{name}") as runner:
        left = runner.run(BF16, SHORT, timeout_seconds=60)
        assert comparable(runner.run(FP32, SHORT, timeout_seconds=60)) == alone
    is_replaced = any("the process was replaced" in note and "left behind" in note for note in left.notes)
    assert is_replaced or name not in KEEPS_WHAT_IT_CHANGES


def test_a_trial_that_leaves_nothing_behind_leaves_no_mode() -> None:
    modes_left()
    InlineWorker(build()).run(BF16, SHORT)
    assert modes_left() == []


def test_a_process_that_a_task_forks_does_not_answer() -> None:
    with worker("always:fork") as runner:
        asked = [FP32, BF16, FP32]
        found = [runner.run(policy, SHORT, timeout_seconds=60) for policy in asked]
    with worker("none") as runner:
        expected = [runner.run(policy, SHORT, timeout_seconds=60) for policy in asked]
    assert [each.train_losses for each in found] == [each.train_losses for each in expected]
