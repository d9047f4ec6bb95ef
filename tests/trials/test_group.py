"""A trial on several GPUs: two gloo processes train what one trains with the doubled batch."""

from __future__ import annotations

import json
import multiprocessing
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from group_tasks import group_task
from small_tasks import build, gan_task, small_task

from autoprec.errors import StudyError, UsageError
from autoprec.policy import GradScalerSettings, Number, Policy
from autoprec.tasks import TaskSource
from autoprec.tasks.source import with_source
from autoprec.trials import InlineWorker, Outcome, TrialSettings, Worker
from autoprec.trials.group import check_group, merge
from autoprec.trials.rank import run_rank

pytestmark = pytest.mark.skipif(
    not dist.is_available() or not dist.is_gloo_available(), reason="this torch has no gloo"
)

FP32 = Policy(default="fp32")
FP16 = Policy(default="fp16", dtype="fp16", grad_scaler=GradScalerSettings(init_scale=1.4 * 2.0**20))
"""The largest gradients are .39 to .61, of the processes' halves as of the whole batch: none fits at 2.8 times 2^16,
all fit at 1.4. A scale between the limits of a half and of the whole would skip once more in a group, as it should."""
ALONE = TrialSettings(warmup_steps=2, measured_steps=12, batchnorm_batches=0)
TOGETHER = ALONE.model_copy(update={"num_processes": 2})
SOURCE = TaskSource("function", {"name": f"{Path(__file__).with_name('group_tasks.py')}:group_task"})


def run_here(folder: str, rank: int) -> None:
    """Be one of the processes that torchrun would start; started warm, which is quicker."""
    request = json.loads((Path(folder) / "request.json").read_text())
    sys.path[:] = request["path"]
    request["policy"] = request["policies"][rank]
    answer = run_rank(request, init_method=f"file://{folder}/store", rank=rank)
    (Path(folder) / f"outcome-{rank}.json").write_text(json.dumps(answer))


def run_group(folder: Path, *policies: Policy) -> list[dict[str, Any]]:
    """Run a trial in two processes, each with its policy, and return their answers."""
    request = {
        "source": asdict(SOURCE),
        "settings": TOGETHER.model_dump(mode="json"),
        "policies": [policy.to_json() for policy in policies],
        "num_threads": 1,
        "path": sys.path,
    }
    (folder / "request.json").write_text(json.dumps(request))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["autoprec.trials.preload"])
    ranks = [context.Process(target=run_here, args=(str(folder), rank)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(60)
        rank.kill()
    return [json.loads((folder / f"outcome-{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("policy", [FP32, FP16], ids=["fp32", "fp16"])
def test_two_processes_train_what_one_does_with_the_doubled_batch(policy: Policy, tmp_path: Path) -> None:
    together = merge([Outcome.model_validate(answer["outcome"]) for answer in run_group(tmp_path, policy, policy)])
    alone = InlineWorker(group_task(64)).run(policy, ALONE)
    assert (together.kind, together.message, alone.kind) == ("ok", "", "ok")
    assert together.train_losses == pytest.approx(alone.train_losses, rel=1e-4 if policy is FP32 else 2e-2)
    assert together.scale_history == alone.scale_history
    assert together.num_steps_skipped == alone.num_steps_skipped
    assert (together.num_steps_skipped > 0) == (policy is FP16)
    assert together.throughput_samples_per_second is not None
    assert together.throughput_samples_per_second.kind == "predicted"


def test_processes_with_different_policies_do_not_train(tmp_path: Path) -> None:
    answers = run_group(tmp_path, FP32, FP32.replace(default="autocast", dtype="bf16"))
    assert all("different policies" in answer["outcome"]["message"] for answer in answers)


def ok(**changes: Any) -> Outcome:
    return Outcome(kind="ok", **changes)


def test_a_group_has_the_memory_of_its_worst_process_and_the_speed_of_its_slowest() -> None:
    numbers = [(2.0, 30.0), (3.0, 20.0)]
    merged = merge(
        [
            ok(
                peak_memory_bytes=Number(value=memory, kind="measured"),
                throughput_samples_per_second=Number(value=speed, kind="measured"),
            )
            for memory, speed in numbers
        ]
    )
    assert merged.peak_memory_bytes == Number(value=3.0, kind="measured")
    assert merged.throughput_samples_per_second == Number(value=20.0, kind="measured")


def test_a_process_that_failed_is_the_outcome_and_scales_that_differ_are_an_error() -> None:
    assert merge([ok(), Outcome(kind="out_of_memory", message="rank 1")]).message == "rank 1"
    with pytest.raises(StudyError, match="fell out of step"):
        merge([ok(scale_history=[2.0]), ok(scale_history=[1.0])])


@pytest.mark.parametrize(
    ("task", "settings", "message"),
    [
        (small_task(), {}, "other processes cannot build this task"),
        (with_source(gan_task(), SOURCE), {}, "has several losses"),
        (with_source(small_task(), SOURCE), {"device": "cuda:1"}, "give the device as cuda"),
        (with_source(small_task(), SOURCE), {"device": "cuda", "num_processes": 99}, r"torch sees \d+ here"),
    ],
    ids=["source", "losses", "number", "count"],
)
def test_a_group_that_cannot_be_is_refused(task: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check_group(task, TOGETHER.model_copy(update=settings))


@pytest.mark.slow
def test_a_worker_starts_the_group_by_torchrun_and_ends_one_that_hangs() -> None:
    with Worker(SOURCE, num_threads=2) as worker:
        outcome = worker.run(FP32, TOGETHER, timeout_seconds=120)
        assert (outcome.kind, outcome.message, len(outcome.train_losses)) == ("ok", "", 14)
    hanging = TaskSource("function", {"name": f"{build.__code__.co_filename}:build", "arguments": {"fault": "hang"}})
    with Worker(hanging) as worker:
        outcome = worker.run(Policy(default="autocast", dtype="bf16"), TOGETHER, timeout_seconds=20)
        assert (outcome.kind, outcome.message) == ("timeout", "no result within 20 s")
