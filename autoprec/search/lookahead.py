"""Measurements made ahead: as many at once as the measurement allows, their results in the order asked for."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

from autoprec.policy import Policy
from autoprec.trials.outcome import Outcome, TrialSettings

__all__ = ["Measure", "measure_ahead", "num_parallel"]

Measure = Callable[[Policy, TrialSettings], Outcome]
"""Run one trial. Never raises for a policy that diverges or is impossible.

One that can run several at once says so in `num_parallel`, and has `stop()`, which ends those that are running.
"""

KeyT = TypeVar("KeyT")


def num_parallel(measure: Measure) -> int:
    """Return how many trials the measurement can run at once."""
    return int(getattr(measure, "num_parallel", 1))


def measure_ahead(
    measure: Measure, jobs: Iterable[tuple[KeyT, Policy, TrialSettings]]
) -> Generator[tuple[KeyT, Outcome], None, None]:
    """Run the jobs and yield each one's key and outcome, in order.

    A job is taken from `jobs` when it can start: what decides whether it is needed sees all results yielded before.
    Close the iterator (or let an exception through it) to end what is running.
    """
    limit = num_parallel(measure)
    if limit == 1:
        for key, policy, settings in jobs:
            yield key, measure(policy, settings)
        return
    executor = ThreadPoolExecutor(limit, thread_name_prefix="autoprec-measure")
    source = iter(jobs)
    running: deque[tuple[KeyT, Future[Outcome]]] = deque()
    is_done = False
    try:
        while True:
            for key, policy, settings in islice(source, limit - len(running)):
                running.append((key, executor.submit(measure, policy, settings)))
            if not running:
                break
            key, future = running.popleft()
            yield key, future.result()
        is_done = True
    finally:
        if not is_done:
            measure.stop()  # type: ignore[attr-defined]
        executor.shutdown(wait=True, cancel_futures=True)
