"""A trial on several GPUs, seen from the search: a torchrun child, watched, and one outcome of all its processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from autoprec.errors import StudyError, TaskError, UsageError
from autoprec.policy import Number, Policy
from autoprec.tasks.protocol import Task
from autoprec.tasks.source import TaskSource
from autoprec.trials.failures import scrub, tail
from autoprec.trials.outcome import Outcome, TrialSettings

__all__ = ["Group", "check_group", "merge"]

MAX_STDERR = 4_000
END_SECONDS = 10.0
"""For which a killed group may take to be gone."""


def check_group(task: Task, settings: TrialSettings) -> None:
    """Refuse a trial on several GPUs where it cannot be.

    Raises:
        UsageError: fewer GPUs here, one named by its number, a task that other processes cannot build or that has
            several losses (DistributedDataParallel follows one backward pass).
    """
    import torch

    size = settings.num_processes
    if size == 1:
        return
    kind, _, index = settings.device.partition(":")
    if index:
        raise UsageError(f"{size} GPUs for a trial and device {settings.device!r}; give the device as {kind}")
    if kind == "cuda" and size > torch.cuda.device_count():
        raise UsageError(f"{size} GPUs for a trial: torch sees {torch.cuda.device_count()} here")
    if task.source is None:
        raise UsageError(
            f"{size} GPUs for a trial: other processes cannot build this task; give its name (file:function)"
        )
    if task.losses:
        raise UsageError(f"{size} GPUs for a trial: task {task.name!r} has several losses, which is not supported")


class Group:
    """The processes of one trial; `kill` ends them from any thread."""

    def __init__(self, source: TaskSource, *, num_threads: int) -> None:
        self._about = {"source": asdict(source), "num_threads": num_threads, "search_pid": os.getpid()}
        self._process: subprocess.Popen[bytes] | None = None
        self._is_killed = False

    def run(self, policy: Policy, settings: TrialSettings, *, timeout_seconds: float | None) -> Outcome:
        """Run one trial and return what the group gave; one that hangs or crashes is an outcome.

        Raises:
            TaskError: a process could not build the task.
            StudyError: the processes fell out of step.
        """
        message = {"policy": policy.to_json(), "settings": settings.model_dump(mode="json")}
        with tempfile.TemporaryDirectory(prefix="autoprec-") as name, tempfile.TemporaryFile() as stderr:
            folder = Path(name)
            (folder / "request.json").write_text(json.dumps(self._about | message))
            ended = self._run(folder, settings.num_processes, stderr, timeout_seconds)
            answers = [json.loads(path.read_text()) for path in sorted(folder.glob("outcome-*.json"))]
            text = _read_tail(stderr)
        if ended is None:
            return Outcome(kind="timeout", message=f"no result within {timeout_seconds:g} s", stderr_tail=text)
        outcomes = _outcomes(answers)
        if len(outcomes) < settings.num_processes and all(outcome.is_ok for outcome in outcomes):
            lost = settings.num_processes - len(outcomes)
            message_ = f"{lost} of {settings.num_processes} processes gave no result: torchrun ended with {ended}"
            return Outcome(kind="crashed", message=message_, stderr_tail=text)
        return merge(outcomes)

    def kill(self) -> None:
        self._is_killed = True
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _run(self, folder: Path, size: int, stderr: IO[bytes], timeout_seconds: float | None) -> int | None:
        """Return torchrun's exit code, None where it took too long; nothing of it is left."""
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
        paths = os.pathsep.join(path for path in sys.path if path)
        self._process = subprocess.Popen(
            [*command, f"--nproc-per-node={size}", "-m", "autoprec.trials.rank", str(folder)],
            stdout=stderr,
            stderr=stderr,
            stdin=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": paths},
            start_new_session=True,
        )
        try:
            if self._is_killed:  # in another thread, while the process was started
                self.kill()
            return self._process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            self.kill()
            with suppress(subprocess.TimeoutExpired):  # a driver that does not answer keeps even a killed process
                self._process.wait(END_SECONDS)


def merge(outcomes: Sequence[Outcome]) -> Outcome:
    """Return one outcome of a group: the first that did not end well, else the first with the memory of the worst.

    Raises:
        StudyError: the loss scales or the taken steps of the processes differ.
    """
    failed = [outcome for outcome in outcomes if not outcome.is_ok]
    if failed:
        return failed[0]
    first = outcomes[0]
    for other in outcomes[1:]:
        if (other.scale_history, other.num_steps_taken) != (first.scale_history, first.num_steps_taken):
            raise StudyError("the processes of one trial fell out of step: their grad scalers differ")
    return first.model_copy(
        update={
            "peak_memory_bytes": _extreme(max, [outcome.peak_memory_bytes for outcome in outcomes]),
            "throughput_samples_per_second": _extreme(
                min, [outcome.throughput_samples_per_second for outcome in outcomes]
            ),
            "wall_seconds": max(outcome.wall_seconds for outcome in outcomes),
        }
    )


def _extreme(choose: Any, numbers: Sequence[Number | None]) -> Number | None:
    known = [number for number in numbers if number is not None]
    return choose(known, key=lambda number: number.value) if known else None


def _outcomes(answers: Sequence[dict[str, Any]]) -> list[Outcome]:
    for answer in answers:
        if "error" in answer:
            raise TaskError(answer["error"])
    return [Outcome.model_validate(answer["outcome"]) for answer in answers]


def _read_tail(stderr: IO[bytes]) -> str:
    size = stderr.seek(0, os.SEEK_END)
    stderr.seek(max(0, size - 2 * MAX_STDERR))
    return tail(scrub(stderr.read().decode("utf-8", "replace").strip()), max_characters=MAX_STDERR)
