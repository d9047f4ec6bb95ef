"""How long the overhead of a trial, a new worker and the end of a hung trial take."""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from autoprec.policy import Policy
from survival_parts.ends import BF16, FP32, open_worker
from survival_parts.killed_search import short


def times(count: int) -> None:
    first = timed(lambda: open_worker().start())
    with open_worker() as worker:
        ready = [timed(worker.start)]
        for _ in range(4):
            os.kill(worker.pid, signal.SIGKILL)
            ready.append(timed(worker.start))
        print(f"times: a new worker ready within {max(ready):.2f} s (worst of {len(ready)}); the first, with the fork "
              f"server, {first:.2f} s")  # fmt: skip
        warm = [overhead(worker.run) for _ in range(count)]
    fresh = [overhead(run_in_a_fresh_worker) for _ in range(5)]
    spawned = [timed(lambda: subprocess.run([sys.executable, "-c", SPAWNED], check=True)) for _ in range(3)]
    print(
        f"times: overhead of a warm trial {statistics.median(warm) * 1e3:.1f} ms (median of {count}, worst "
        f"{max(warm) * 1e3:.0f} ms); of a fresh process from the fork server {statistics.median(fresh) * 1e3:.0f} ms; "
        f"of a new interpreter {statistics.median(spawned) * 1e3:,.0f} ms and more"
    )
    with open_worker("spin") as worker:
        worker.start()
        late = [timed(lambda: worker.run(BF16, short(), timeout_seconds=2.0)) - 2.0]
        late.append(timed(lambda: [worker.start(), worker.run(BF16, short(), timeout_seconds=2.0)]) - 2.0)
    with open_worker("spin with the lock") as worker:
        worker.start()
        late.append(timed(lambda: worker.run(BF16, short(), timeout_seconds=2.0)) - 2.0)
    print(f"times: a hung trial ended {max(late):.2f} s after its time limit (worst of {len(late)})")


SPAWNED = "import autoprec.trials.runner, autoprec.estimates"


def timed(act: Callable[[], Any]) -> float:
    started = time.perf_counter()
    act()
    return time.perf_counter() - started


def overhead(run: Callable[..., Any]) -> float:
    """Return the time that a trial takes beyond the trial itself, as its own process measured it."""
    started = time.perf_counter()
    outcome = run(FP32, short())
    return time.perf_counter() - started - outcome.wall_seconds


def run_in_a_fresh_worker(policy: Policy, settings: Any) -> Any:
    with open_worker() as worker:
        return worker.run(policy, settings)
