"""Many trials in one search, and trainings that become NaN."""

from __future__ import annotations

import math
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from survival_parts.killed_search import TASKS, run_the_search, short


def endurance(count: int) -> None:
    import torch

    torch.set_num_threads(1)
    from autoprec.search.events import Events
    from autoprec.search.measuring import open_measure
    from autoprec.search.pipeline import run_search
    from autoprec.search.plan import SearchSettings, prepare_search
    from autoprec.search.proof import build_proof
    from autoprec.tasks.source import resolve_task

    class Watch(Events):
        """Notes after each trial what this process holds, and the time between trials that no trial took."""

        def __init__(self) -> None:
            self.resident: list[int] = []
            self.files: list[int] = []
            self.overhead: list[float] = []
            self.last = time.perf_counter()

        def trial_finished(self, record: Any, *, num_finished: int, n_trials: int) -> None:
            now = time.perf_counter()
            self.overhead.append(now - self.last - record.outcome.wall_seconds)
            self.resident.append(int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"))
            self.files.append(len(os.listdir("/proc/self/fd")))
            self.last = time.perf_counter()

    watch = Watch()
    with tempfile.TemporaryDirectory() as root:
        settings = SearchSettings(
            n_trials=count, output=root, proof=build_proof(0.5, 4, num_steps=4), num_workers=1, sampler="random"
        )
        plan = prepare_search(resolve_task(f"{TASKS}:task"), trial=short(), settings=settings)
        with open_measure(plan.task, timeout_seconds=60) as measure:
            run_search(plan, measure, events=watch)
    grown = (watch.resident[-1] - watch.resident[20]) / 2**20
    first, last = (statistics.median(part) for part in (watch.overhead[20:120], watch.overhead[-100:]))
    print(
        f"endurance: {len(watch.resident)} trials: resident memory of the search grew by {grown:.1f} MiB after the 20th"
        f"; open files {watch.files[20]} then, {watch.files[-1]} at the end; overhead with the study's writes "
        f"{first * 1e3:.0f} ms (trials 20 to 120), {last * 1e3:.0f} ms (last 100): {last / first:.2f}x"
    )


def nan() -> None:
    with tempfile.TemporaryDirectory() as root:
        result = run_the_search(Path(root) / "run", function="overflowing", n_trials=30)
        failed = [r for r in result.records if not r.outcome.is_ok and not r.is_cached]
        visits = [r for r in result.records if not r.is_cached and r.number > min(f.number for f in failed)]
        more = [r for r in visits if not r.outcome.is_ok]
        kinds = sorted({r.outcome.kind for r in failed})
        infeasible = all(not r.is_feasible for r in failed)
        values = [value for trial in result.study.trials for value in trial.values or ()]
        finite = all(math.isfinite(value) for value in values)
        texts = [path.read_text() for path in (Path(root) / "run").glob("*.json")]
        clean = finite and not any(word in text for text in texts for word in ("NaN", "Infinity"))
        print(
            f"nan: recorded as {', '.join(kinds)}, infeasible: {infeasible}; {len(more)} more such trials among the "
            f"{len(visits)} after the first; no NaN in any value or file: {clean}; the unit in the policy: "
            f"{result.policy.modules.get('length', result.policy.default)}"
        )
