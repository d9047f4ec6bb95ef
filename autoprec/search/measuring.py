"""The measurement of a search: trials in worker processes that are kept warm."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autoprec.policy import Policy
from autoprec.profiling.profile import Profile
from autoprec.search.lookahead import Measure
from autoprec.tasks.protocol import Task
from autoprec.trials.outcome import Outcome, TrialSettings
from autoprec.trials.pool import WorkerPool

__all__ = ["open_measure"]

PROFILER = "autoprec.profiling.run:profile_as_json"


@dataclass(frozen=True, slots=True)
class _PoolMeasure:
    pool: WorkerPool
    timeout_seconds: float | None

    @property
    def num_parallel(self) -> int:
        return self.pool.num_workers

    def stop(self) -> None:
        self.pool.stop()

    def __call__(self, policy: Policy, settings: TrialSettings) -> Outcome:
        return self.pool.run(policy, settings, timeout_seconds=self.timeout_seconds)

    def profile(self, units: Sequence[str], settings: TrialSettings, study_name: str) -> Profile:
        arguments = {"units": list(units), "settings": settings.model_dump(mode="json"), "study_name": study_name}
        value = self.pool.call(PROFILER, arguments, timeout_seconds=self.timeout_seconds)
        return Profile.model_validate(value)


@contextlib.contextmanager
def open_measure(
    task: Task, *, timeout_seconds: float | None, num_workers: int = 1, devices: Sequence[str] = ()
) -> Iterator[Measure]:
    """Yield a measurement of `task`; its processes start with the first trials and end with the context.

    With several `devices` there is a process for each, which runs its trials there; else they run where they say.
    """
    with WorkerPool(task, num_workers=num_workers, devices=devices if len(devices) > 1 else ()) as pool:
        yield _PoolMeasure(pool, timeout_seconds)
