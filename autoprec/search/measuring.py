"""The measurement of a search: trials in a worker process that is kept warm."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from autoprec.policy import Policy
from autoprec.search.runner import Measure
from autoprec.tasks.protocol import Task
from autoprec.trials.outcome import Outcome, TrialSettings
from autoprec.trials.runner import run_trial

__all__ = ["open_measure"]


@contextlib.contextmanager
def open_measure(task: Task, *, timeout_seconds: float) -> Iterator[Measure]:
    """Yield a measurement of `task`."""

    def measure(policy: Policy, settings: TrialSettings) -> Outcome:
        return run_trial(task, policy, settings)

    yield measure
