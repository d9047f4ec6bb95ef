"""A search on an engine: its workers, then the proof as one more job; what is found is written here."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from optuna.storages import RDBStorage
from optuna.study import get_all_study_names, load_study
from optuna.trial import TrialState

from autoprec.engines import ENGINES
from autoprec.engines.command import Command, Finished
from autoprec.errors import AutoprecError, StudyError, UsageError, did_you_mean
from autoprec.policy import write_atomically
from autoprec.search.events import Events
from autoprec.search.sharing import get_total
from autoprec.search.storage import opened
from autoprec.search.study import is_finished, read_record

__all__ = ["Engine", "Job", "last_line", "open_engine", "run_on_engine"]

POLL_SECONDS = 0.5
MAX_RESTARTS = 3
"""Jobs that are started again in place of one that the engine has lost, for each worker."""
LAST_SECONDS = 15.0
"""For which workers may go on when no trial is missing and none runs."""


class Job(Protocol):
    """One command that an engine runs."""

    def is_done(self) -> bool: ...

    def result(self) -> Finished:
        """Return how the command ended.

        Raises:
            LostJobError: the engine has lost it: a node, a container, a time limit.
        """
        ...

    def cancel(self) -> None: ...


class Engine(Protocol):
    """Starts commands somewhere else.

    Attributes:
        num_workers: how many commands to start where nobody says it.
    """

    @property
    def num_workers(self) -> int: ...

    def start(self, command: Command, *, count: int) -> Sequence[Job]:
        """Start a command `count` times."""
        ...

    def close(self) -> None: ...


class LostJobError(AutoprecError):
    """A job that ended without a result."""


def open_engine(name: str, settings: dict[str, Any]) -> Engine:
    """Return the engine called "slurm", "slurm:local", "ray" or "ray:ADDRESS".

    Raises:
        UsageError: there is none of that name, or its package is not installed.
    """
    kind, _, place = name.partition(":")
    if kind == "slurm":
        from autoprec.engines.slurm import SlurmEngine

        return SlurmEngine(cluster=place or "slurm", **settings)
    if kind == "ray":
        from autoprec.engines.ray import RayEngine

        return RayEngine(address=place or None, **settings)
    raise UsageError(f"engine {name!r}; allowed: local, slurm, ray, ray:ADDRESS{did_you_mean(kind, ENGINES)}")


def run_on_engine(
    engine: Engine,
    worker: Command,
    proof: Command,
    *,
    num_workers: int,
    storage: str,
    study_name: str,
    folder: Path,
    events: Events,
) -> Finished:
    """Run workers until the study has its total, have it proved, and write the files of the proof into `folder`.

    A job that the engine loses is started again, `MAX_RESTARTS` times for each worker. One that ends with an error of
    the user's is not.

    Raises:
        StudyError: no worker is left and trials are missing; the last lines of one of them say why.
        KeyboardInterrupt: passed on after the jobs have been cancelled.
    """
    jobs: list[Job] = []
    try:
        jobs += engine.start(worker, count=num_workers)
        with opened(storage) as database:
            _watch(engine, worker, jobs, database, study_name, num_workers, events)
        events.note("the trials are done; the proof runs as one more job")
        jobs += engine.start(proof, count=1)
        while not jobs[-1].is_done():
            time.sleep(POLL_SECONDS)
        finished = jobs[-1].result()
    except BaseException:
        for job in jobs:
            job.cancel()
        raise
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in finished.files.items():
        write_atomically(folder / name, text)
    return finished


def _watch(
    engine: Engine,
    worker: Command,
    jobs: list[Job],
    database: RDBStorage,
    study_name: str,
    num_workers: int,
    events: Events,
) -> None:
    told = _Told(database, study_name, events)
    restarts, ended = 0, []
    busy = time.monotonic()
    while jobs:
        time.sleep(POLL_SECONDS)
        told.look()
        if told.num_missing or told.num_running:
            busy = time.monotonic()
        elif time.monotonic() - busy > LAST_SECONDS:
            for job in jobs:  # one that waits to be run again, say: there is nothing left for it
                job.cancel()
            jobs.clear()
        for job in [job for job in jobs if job.is_done()]:
            jobs.remove(job)
            try:
                finished = job.result()
            except LostJobError as error:
                events.note(f"a job was lost: {error}")
                if told.num_missing and restarts < MAX_RESTARTS * num_workers:
                    restarts += 1
                    jobs += engine.start(worker, count=1)
                continue
            ended.append(finished)
            if finished.exit_code != 0:
                events.note(f"a worker ended with exit code {finished.exit_code}: {last_line(finished.stderr)}")
    told.look()
    if told.num_missing and not any(each.exit_code == 0 for each in ended):  # else the time was over
        why = next((each.stderr for each in ended), "") or "all of them were lost"
        raise StudyError(f"no worker is left, and {told.num_missing} trials are missing\n{why.rstrip()}")


def last_line(text: str) -> str:
    """Return the last line that is not empty: what a program or an exception ends with."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "it says nothing")


class _Told:
    """Tells the finished trials of a study, whoever ran them."""

    def __init__(self, database: RDBStorage, study_name: str, events: Events) -> None:
        self._database, self._name, self._events = database, study_name, events
        self._seen: set[int] = set()
        self._study: Any = None
        self._num_finished = 0

    def look(self) -> None:
        if self._study is None:
            if self._name not in get_all_study_names(self._database):
                return
            self._study = load_study(study_name=self._name, storage=self._database)
        for trial in self._study.get_trials(deepcopy=False):
            if trial.number in self._seen or not is_finished(trial):
                continue
            self._seen.add(trial.number)
            record = read_record(trial)
            if not record.is_cached:
                self._num_finished += 1
                self._events.trial_finished(record, num_finished=self._num_finished, n_trials=get_total(self._study))

    @property
    def num_running(self) -> int:
        return 0 if self._study is None else len(self._study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)))

    @property
    def num_missing(self) -> int:
        from autoprec.search.study import EXHAUSTED

        if self._study is None:
            return 1
        if self._study.user_attrs.get(EXHAUSTED, False):
            return 0
        return max(0, get_total(self._study) - self._num_finished)
