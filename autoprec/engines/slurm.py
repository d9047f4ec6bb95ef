"""SLURM by submitit: an array of workers, which are queued again when they are preempted or out of time."""

from __future__ import annotations

import contextlib
import math
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from autoprec.engines.command import Command, Finished
from autoprec.engines.run import Job, LostJobError, last_line
from autoprec.errors import UsageError

__all__ = ["SlurmEngine"]

QUEUE_SECONDS = 5.0
"""Between two looks at SLURM's queue: its controller answers all users of the cluster."""
MISSING_SECONDS = 20.0
"""For which a job is in no queue and has no result before it counts as lost: a network folder may show that late."""
SQUEUE_SECONDS = 60.0


class SlurmEngine:
    """Starts commands as SLURM jobs.

    Args:
        cluster: "slurm", or "local": submitit's own, which runs the jobs as processes of this machine.
        folder: for scripts and logs; all nodes must see it.
        num_gpus: of each job.
        partition: SLURM's; None takes its default.
        minutes: after which SLURM ends a job; it is then queued again, as often as submitit allows.
        parameters: further options of sbatch, such as account or qos.
    """

    def __init__(
        self,
        *,
        cluster: str = "slurm",
        folder: Path,
        num_gpus: int,
        partition: str | None = None,
        minutes: int = 60,
        parameters: Mapping[str, str] | None = None,
    ) -> None:
        try:
            import submitit
        except ImportError:
            raise UsageError("engine slurm: submitit is not installed; pip install 'autoprec[slurm]'") from None
        if cluster not in ("slurm", "local"):
            raise UsageError(f"engine slurm:{cluster}; allowed: slurm, slurm:local")
        try:
            self._executor = submitit.AutoExecutor(folder=folder, cluster=cluster)
        except RuntimeError as error:  # no sbatch here
            raise UsageError(f"engine slurm: {error}") from None
        settings: dict[str, Any] = {"name": "autoprec", "timeout_min": minutes, "gpus_per_node": num_gpus}
        if cluster == "slurm":
            settings |= {} if partition is None else {"slurm_partition": partition}
            settings |= {"slurm_additional_parameters": dict(parameters)} if parameters else {}
        self._executor.update_parameters(**settings)
        self._queue = _Queue() if cluster == "slurm" else None

    @property
    def num_workers(self) -> int:
        """One: what a cluster has room for, SLURM alone knows."""
        return 1

    def start(self, command: Command, *, count: int) -> Sequence[Job]:
        """Submit a command `count` times, as one array.

        Raises:
            UsageError: SLURM refuses it, in its own words.
        """
        from submitit.core.utils import FailedJobError

        try:
            with self._executor.batch():
                jobs = [self._executor.submit(command) for _ in range(count)]
        except FailedJobError as error:
            raise UsageError(f"engine slurm: {'; '.join(str(error).strip().splitlines())}") from None
        return [_SlurmJob(job, self._queue) for job in jobs]

    def close(self) -> None:
        """Leave the jobs to SLURM."""


class _SlurmJob:
    """A submitted job; done when its result is there, or when SLURM has no such job any more.

    Submitit would ask SLURM's accounting database, which not every cluster has: without it a job that is lost is
    waited for without end.
    """

    def __init__(self, job: Any, queue: _Queue | None) -> None:
        self._job = job
        self._queue = queue
        self._missing_since: float | None = None

    def is_done(self) -> bool:
        if self._queue is None:  # submitit's own executor, which knows its processes
            return bool(self._job.done())
        return self._has_result() or self._is_lost(self._queue)

    def _has_result(self) -> bool:
        paths = self._job.paths
        with contextlib.suppress(OSError):  # a network folder is looked at anew
            paths.folder.chmod(paths.folder.stat().st_mode)
        return bool(paths.result_pickle.exists())

    def _is_lost(self, queue: _Queue) -> bool:
        if queue.holds(self._job.job_id):
            self._missing_since = None
            return False
        self._missing_since = self._missing_since or time.monotonic()
        return time.monotonic() - self._missing_since > MISSING_SECONDS

    def result(self) -> Finished:
        from submitit.core.utils import UncompletedJobError

        if self._queue is not None and not self._has_result():
            raise LostJobError(f"job {self._job.job_id}: SLURM has ended it; {last_line(self._job.stderr() or '')}")
        try:
            finished: Finished = self._job.result()
        except UncompletedJobError as error:
            raise LostJobError(f"job {self._job.job_id}: {last_line(str(error))}") from None
        return finished

    def cancel(self) -> None:
        self._job.cancel(check=False)


class _Queue:
    """The jobs of this user that SLURM has not ended."""

    def __init__(self) -> None:
        self._held: set[str] | None = None
        self._looked = -math.inf

    def holds(self, job_id: str) -> bool:
        """Whether a job waits, runs or is queued again; yes where SLURM does not answer."""
        if time.monotonic() - self._looked > QUEUE_SECONDS:
            self._held, self._looked = self._look(), time.monotonic()
        return self._held is None or job_id in self._held

    def _look(self) -> set[str] | None:
        command = ["squeue", "--noheader", "--array", "--format=%i", f"--user={os.getuid()}"]
        try:
            told = subprocess.run(command, capture_output=True, text=True, timeout=SQUEUE_SECONDS, check=True)
        except (OSError, subprocess.SubprocessError):
            return None
        return set(told.stdout.split())
