"""Several workers of one task: trials at once, each as if alone, and all of them ended together."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest
import torch
from small_tasks import small_task

from autoprec.policy import Policy
from autoprec.search.lookahead import measure_ahead
from autoprec.search.measuring import open_measure
from autoprec.tasks import TaskSource
from autoprec.trials import TrialSettings, Worker, WorkerPool
from autoprec.trials.pool import MAX_WORKERS, default_num_workers

FP32 = Policy(default="fp32")
SHORT = TrialSettings(warmup_steps=1, measured_steps=2, batchnorm_batches=1)
FILE = Path(__file__).with_name("small_tasks.py")


def source(fault: str = "none") -> TaskSource:
    return TaskSource("function", {"name": f"{FILE}:build", "arguments": {"fault": fault}})


def test_trials_at_once_equal_trials_alone() -> None:
    jobs = [(seed, FP32, SHORT.model_copy(update={"seed": seed})) for seed in (0, 1, 0)]
    with open_measure(source().build(), timeout_seconds=100, num_workers=2) as measure:
        outcomes = dict(enumerate(outcome for _, outcome in measure_ahead(measure, jobs)))
    with Worker(source(), num_threads=max(1, torch.get_num_threads() // 2)) as worker:
        alone = [worker.run(FP32, settings).train_losses for _, _, settings in jobs[:2]]
    assert [outcome.train_losses for outcome in outcomes.values()] == [*alone, alone[0]]
    assert alone[0] != alone[1]


@pytest.mark.parametrize("seconds", [0.0, 3.0], ids=["while the processes start", "in mid-trial"])
def test_stopping_ends_every_trial_that_runs(seconds: float) -> None:
    with WorkerPool(source("always:hang").build(), num_workers=2) as pool:
        kinds: list[str] = []
        threads = [threading.Thread(target=lambda: kinds.append(pool.run(FP32, SHORT).kind)) for _ in range(2)]
        for thread in threads:
            thread.start()
        time.sleep(seconds)
        pool.stop()
        for thread in threads:
            thread.join(30)
        assert kinds == ["crashed", "crashed"]


def test_a_task_without_a_source_runs_in_this_process() -> None:
    with WorkerPool(small_task(), num_workers=1) as pool:
        assert pool.run(FP32, SHORT, timeout_seconds=100).is_ok


@pytest.mark.parametrize(
    ("task", "device", "expected"),
    [
        (small_task(), "cpu", 1),
        (source().build(), "cuda", 1),
        (source().build(), "cpu", min(MAX_WORKERS, len(os.sched_getaffinity(0)), torch.get_num_threads())),
    ],
    ids=["in this process", "where time is measured", "a core each"],
)
def test_as_many_trials_run_at_once_as_disturb_no_measurement(task: object, device: str, expected: int) -> None:
    assert default_num_workers(task, device) == expected  # type: ignore[arg-type]
