"""Ray core: a task for each worker, with as many GPUs as it needs; Ray says which."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Sequence
from typing import Any

from autoprec.engines.command import Command, Finished, WorkerLostError
from autoprec.engines.run import Job, LostJobError
from autoprec.errors import UsageError

__all__ = ["RayEngine"]

MAX_RETRIES = 3
"""Times that Ray runs a task again whose node or process was lost."""
FETCH_SECONDS = 60.0
"""For which the result of a task that is done may take to come: its node may be gone since."""


class RayEngine:
    """Starts commands as Ray tasks.

    Args:
        address: of a cluster; None takes the one that Ray finds (`RAY_ADDRESS`, or one of this machine), else starts
            one on this machine that ends with this object.
        num_gpus: of each task: it sees no others. 0 for a training on CPUs, which takes a core.
    """

    def __init__(self, *, address: str | None = None, num_gpus: int) -> None:
        try:
            import ray
        except ImportError:
            raise UsageError("engine ray: Ray is not installed; pip install 'autoprec[ray]'") from None
        self._ray = ray
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of Ray's own about variables that it will set otherwise
            try:
                ray.init(address=address, ignore_reinit_error=True, log_to_driver=False, include_dashboard=None)
            except ConnectionError as error:
                raise UsageError(f"engine ray: no cluster at {address}: {str(error).splitlines()[0]}") from None
        self._run = ray.remote(
            num_cpus=1, num_gpus=num_gpus, max_retries=MAX_RETRIES, retry_exceptions=[WorkerLostError]
        )(_run)
        self._num_gpus = num_gpus

    @property
    def num_workers(self) -> int:
        """How many commands can run at once on what the cluster has."""
        has = self._ray.cluster_resources()
        return max(1, int(has.get("GPU", 0) // self._num_gpus if self._num_gpus else has.get("CPU", 1)))

    def start(self, command: Command, *, count: int) -> Sequence[Job]:
        """Start a command `count` times; what has no room waits."""
        return [_RayJob(self._ray, self._run.remote(command)) for _ in range(count)]

    def close(self) -> None:
        """Leave the cluster."""
        self._ray.shutdown()


def _run(command: Command) -> Finished:
    return command()


class _RayJob:
    def __init__(self, ray: Any, reference: Any) -> None:
        self._ray, self._reference = ray, reference

    def is_done(self) -> bool:
        done, _ = self._ray.wait([self._reference], timeout=0)
        return bool(done)

    def result(self) -> Finished:
        try:
            finished: Finished = self._ray.get(self._reference, timeout=FETCH_SECONDS)
        except self._ray.exceptions.RayError as error:
            raise LostJobError(str(error).strip().splitlines()[-1]) from None
        return finished

    def cancel(self) -> None:
        with contextlib.suppress(self._ray.exceptions.RayError):
            self._ray.cancel(self._reference)
