"""Many workers on one study: how much faster they are, and what the database costs a trial.

    python benchmarks/workers.py                                       # SQLite, and PostgreSQL on a server of its own
    python benchmarks/workers.py --storage postgresql://me@host/db     # that database alone

Trials sleep, so that a machine of two cores can show what several devices would; the processes are real ones, and are
there before the clock starts. Databases of its own are removed; in one that is given two studies are left.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

TESTS = Path(__file__).parents[1] / "tests"
sys.path[:0] = [str(TESTS / "search"), str(TESTS)]

import optuna  # noqa: E402
from postgres_server import find_programs, postgres_server  # noqa: E402
from toys import Chain, FakeMeasure, tiny_plan, tiny_task  # noqa: E402

from autoprec.search.storage import open_storage  # noqa: E402
from autoprec.search.workers import run_worker  # noqa: E402

UNITS = 54
"""A LayerNorm and a linear layer each for 27 steps; the head is one more."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--storage", help="database URL; SQLite and a PostgreSQL server of its own")
    parser.add_argument("--trials", type=int, default=60)
    parser.add_argument("--seconds", type=float, default=2.0, help="of a trial")
    parser.add_argument("--workers", type=int, default=4)
    given = parser.parse_args()
    for name, url in databases(given.storage):
        print(f"{name}:", flush=True)
        times = {count: speed(url, count, given.trials, given.seconds) for count in (1, given.workers)}
        told = ", ".join(f"{count} worker(s) {seconds:.1f} s" for count, seconds in times.items())
        print(f"  {given.trials} trials that sleep {given.seconds:g} s: {told}; {times[1] / times[given.workers]:.2f}x")
        overhead(url)


def databases(given: str | None) -> Iterator[tuple[str, str]]:
    if given is not None:
        yield given.partition(":")[0], given
        return
    with tempfile.TemporaryDirectory() as folder:
        yield "SQLite", f"sqlite:///{folder}/study.db"
    programs = find_programs()
    if programs is None:
        print("PostgreSQL: no server here")
        return
    with postgres_server(programs, is_safe=True) as url:
        yield "PostgreSQL", url


def speed(url: str, num_workers: int, trials: int, seconds: float) -> float:
    """Return the time from the first trial's start to the last one's end."""
    name = f"speed-{random.getrandbits(32):x}"
    with tempfile.TemporaryDirectory() as folder:
        about = {"storage": url, "study_name": name, "folder": folder, "heartbeat": 15}
        asked = {"workers": num_workers, "n_trials": trials, "seconds": seconds, **about}
        script = [sys.executable, TESTS / "search" / "worker_processes.py"]
        told = subprocess.run(script, input=json.dumps(asked) + "\n", capture_output=True, text=True, check=True)
        assert set(json.loads(told.stdout.splitlines()[-1]).values()) == {0}, told
    finished = [t for t in optuna.load_study(study_name=name, storage=open_storage(url)).trials if t.values]
    assert len(finished) >= trials
    starts, ends = ([getattr(t, which) for t in finished] for which in ("datetime_start", "datetime_complete"))
    return float((max(ends) - min(starts)).total_seconds())


def overhead(url: str) -> None:
    """Print what a trial costs besides its training: proposal, database, all that the loop does."""
    task = tiny_task(model=lambda: Chain(UNITS // 2))
    with tempfile.TemporaryDirectory() as folder, counted_time() as spent:
        plan = tiny_plan(folder, task=task, storage=url, study_name=f"overhead-{random.getrandbits(32):x}")
        marks: list[tuple[float, float]] = []

        class Timed(FakeMeasure):
            def __call__(self, *arguments: object) -> object:
                marks.append((time.perf_counter(), spent[0]))
                return super().__call__(*arguments)  # type: ignore[arg-type]

        run_worker(plan, Timed(noise=0.001), n_trials=40)
    pairs = list(itertools.pairwise(marks[5:]))
    whole = statistics.median(b[0] - a[0] for a, b in pairs)
    database = statistics.median(b[1] - a[1] for a, b in pairs)
    print(
        f"  {len(plan.decisions)} decisions: {1e3 * whole:.0f} ms a trial besides its training,"
        f" {1e3 * database:.0f} ms of it the database's (medians of {len(pairs)})"
    )


@contextmanager
def counted_time() -> Iterator[list[float]]:
    """Yield the seconds that calls of the storage have taken so far, those from inside another one counted once."""
    spent, depth = [0.0], [0]
    storage = optuna.storages.RDBStorage
    names = [n for n in vars(storage) if n.startswith(("create_", "get_", "set_", "check_", "record_", "_get_trials"))]
    before = {name: getattr(storage, name) for name in names}

    def timed(method: object) -> object:
        def call(*arguments: object, **named: object) -> object:
            depth[0] += 1
            started = time.perf_counter()
            try:
                return method(*arguments, **named)  # type: ignore[operator]
            finally:
                depth[0] -= 1
                if depth[0] == 0:
                    spent[0] += time.perf_counter() - started

        return call

    for name, method in before.items():
        setattr(storage, name, timed(method))
    try:
        yield spent
    finally:
        for name, method in before.items():
            setattr(storage, name, method)


if __name__ == "__main__":
    main()
