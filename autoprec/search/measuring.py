"""The measurement of a search: trials in a worker process that is kept warm."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from autoprec.policy import Policy
from autoprec.search.runner import Measure
from autoprec.tasks.protocol import Task
from autoprec.trials.outcome import Outcome, TrialSettings
from autoprec.trials.worker import open_worker

__all__ = ["open_measure"]


@contextlib.contextmanager
def open_measure(task: Task, *, timeout_seconds: float | None) -> Iterator[Measure]:
    """Yield a measurement of `task`; its process starts with the first trial and ends with the context."""
    with open_worker(task) as worker:

        def measure(policy: Policy, settings: TrialSettings) -> Outcome:
            return worker.run(policy, settings, timeout_seconds=timeout_seconds)

        yield measure
