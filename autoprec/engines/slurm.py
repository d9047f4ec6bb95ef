"""SLURM by submitit: an array of workers, which are queued again when they are preempted or out of time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from autoprec.engines.command import Command, Finished
from autoprec.engines.run import Job, LostJobError
from autoprec.errors import UsageError

__all__ = ["SlurmEngine"]


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

    @property
    def num_workers(self) -> int:
        """One: what a cluster has room for, SLURM alone knows."""
        return 1

    def start(self, command: Command, *, count: int) -> Sequence[Job]:
        """Submit a command `count` times, as one array."""
        with self._executor.batch():
            jobs = [self._executor.submit(command) for _ in range(count)]
        return [_SlurmJob(job) for job in jobs]

    def close(self) -> None:
        """Leave the jobs to SLURM."""


class _SlurmJob:
    def __init__(self, job: Any) -> None:
        self._job = job

    def is_done(self) -> bool:
        return bool(self._job.done())

    def result(self) -> Finished:
        from submitit.core.utils import UncompletedJobError

        try:
            finished: Finished = self._job.result()
        except UncompletedJobError as error:
            raise LostJobError(f"job {self._job.job_id}: {str(error).strip().splitlines()[0]}") from None
        return finished

    def cancel(self) -> None:
        self._job.cancel(check=False)
