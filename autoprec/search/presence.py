"""Who runs a trial: the mark that a process leaves on its trials, its heartbeats, and whether another one is gone."""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
import uuid
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Self

import optuna
from optuna.exceptions import StorageInternalError
from optuna.storages import BaseStorage, RDBStorage, fail_stale_trials
from optuna.study import Study
from optuna.trial import FrozenTrial
from sqlalchemy.exc import SQLAlchemyError

from autoprec.policy import content_hash
from autoprec.search.locks import in_turn

__all__ = ["HEARTBEAT_SECONDS", "HOLDER", "Presence", "Role", "start_of", "this_machine"]

HOLDER = "holder"
"""User attribute of a trial: the mark of the process that runs it."""
HEARTBEAT = "autoprec:heartbeat_seconds"
HEARTBEAT_SECONDS = 15
"""Between two signs of life in the database; after `GRACE` of them without one a trial counts as lost."""
GRACE = 4
LEAVE_SECONDS = 10.0
"""For which the last sign of life may take to be written."""
ENDED = ("Z", "X", "x")
"""States of a process that has ended, and that its parent has not waited for yet; in a container often nobody does.
Their letters are from proc(5)."""

Role = Literal["search", "worker"]


class Presence:
    """This process on a study that several may run.

    Trials of a process of this machine are known to be lost as soon as that is gone; those of another machine when
    their heartbeats have stopped for `GRACE` times the study's interval.

    Args:
        study: on an RDB storage; another one is this process's alone.
        role: "search", which goes on for as often as it is ended, or "worker", whose trials are run again once.
        heartbeat_seconds: for a study that has no interval yet; the first process decides.
    """

    def __init__(self, study: Study, storage: BaseStorage, *, role: Role, heartbeat_seconds: int | None = None) -> None:
        self.study = study
        self._storage = storage
        self.mark: dict[str, Any] = {
            "machine": this_machine(),
            "process": os.getpid(),
            "started": start_of(os.getpid()),
            "role": role,
            "id": uuid.uuid4().hex[:12],
        }
        self.heartbeat_seconds = HEARTBEAT_SECONDS
        self._beats = storage if isinstance(storage, RDBStorage) else None
        self._running: set[int] = set()
        self._vouched: dict[int, float] = {}
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        if self._beats is not None:
            self._start_beating(self._beats, heartbeat_seconds)

    def _start_beating(self, storage: RDBStorage, wanted: int | None) -> None:
        known = self.study.user_attrs.get(HEARTBEAT)
        self.heartbeat_seconds = seconds = int(known or wanted or HEARTBEAT_SECONDS)
        if known is None:
            self.study.set_user_attr(HEARTBEAT, seconds)
        storage.heartbeat_interval, storage.grace_period = seconds, GRACE * seconds
        self._thread = threading.Thread(
            target=self._beat, args=(storage, seconds), name="autoprec-heartbeat", daemon=True
        )
        self._thread.start()

    @contextlib.contextmanager
    def turn(self, purpose: str = "turn") -> Iterator[None]:
        """Keep the study's other processes from doing the same meanwhile."""
        with in_turn(self._storage, self.study.study_name, purpose=purpose):
            yield

    def begin(self, trial_id: int) -> None:
        """Show that this process runs a trial, from now on."""
        if self._beats is not None:
            self._beats.record_heartbeat(trial_id)
        self._running.add(trial_id)

    def end(self, trial_id: int) -> None:
        self._running.discard(trial_id)

    def is_mine(self, trial: FrozenTrial) -> bool:
        return bool(trial.user_attrs.get(HOLDER, {}).get("id") == self.mark["id"])

    def is_lost(self, trial: FrozenTrial) -> bool:
        """Whether nobody runs a RUNNING trial any more, as far as this machine can tell.

        Call it in turn: a trial is marked in the turn in which it is taken.
        """
        holder: Mapping[str, Any] | None = trial.user_attrs.get(HOLDER)
        if holder is None:
            return True
        if self.is_mine(trial) or holder["machine"] != self.mark["machine"]:
            return False
        if holder["process"] == os.getpid():  # an earlier search of this process that was cut off
            return True
        is_there: bool = start_of(holder["process"]) == holder["started"]
        return not is_there

    def others_elsewhere(self, running: list[FrozenTrial]) -> bool:
        """Whether one of these trials is run on another machine, or was, as far as its heartbeats tell yet."""
        marks = [(trial, trial.user_attrs.get(HOLDER)) for trial in running]
        away = [trial for trial, mark in marks if mark is not None and mark["machine"] != self.mark["machine"]]
        self.fail_stale(running)
        return bool(away)

    def fail_stale(self, running: list[FrozenTrial]) -> None:
        """Let Optuna fail the trials of other machines whose heartbeats have stopped.

        One of another machine that this process sees for the first time is given a heartbeat: its process may have
        ended before its own. Those of this machine are given one as often as it takes: their processes are there,
        however slow, or stopped.
        """
        if self._beats is None:
            return
        now = time.time()  # which goes on while a machine sleeps
        for trial in running:
            is_here = trial.user_attrs.get(HOLDER, {}).get("machine") == self.mark["machine"]
            start = trial.datetime_start.timestamp() if is_here and trial.datetime_start is not None else -math.inf
            if now - self._vouched.get(trial._trial_id, start) >= (self.heartbeat_seconds if is_here else math.inf):
                self._vouched[trial._trial_id] = now
                with contextlib.suppress(KeyError, optuna.exceptions.UpdateFinishedTrialError):
                    self._beats.record_heartbeat(trial._trial_id)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            fail_stale_trials(self.study)

    def _beat(self, storage: RDBStorage, seconds: float) -> None:
        while not self._stopped.wait(seconds):
            for trial_id in list(self._running):
                with contextlib.suppress(SQLAlchemyError, StorageInternalError, KeyError):  # the next one may get there
                    storage.record_heartbeat(trial_id)
        storage.remove_session()  # this thread's own

    def close(self) -> None:
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(LEAVE_SECONDS)  # a database that does not answer holds it, and it holds nothing

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def this_machine() -> str:
    """Return a mark that all processes that see each other's numbers have in common, and that names nobody."""
    told = []
    for path in (Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")):
        with contextlib.suppress(OSError):
            told.append(os.readlink(path) if path.is_symlink() else path.read_text().strip())
    return content_hash(" ".join(told) if told else f"{uuid.getnode()}")[:12]


def start_of(process: int) -> str:
    """Return when a process started, as the system counts it; "" where there is none of that number, or it has ended.

    A number is given again in time: with its start it names one process. Where the system does not tell, whether
    there is one is all that is known.
    """
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        return "" if fields[0] in ENDED else fields[19]
    except (OSError, IndexError):
        pass
    if Path("/proc/self/stat").exists():
        return ""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return ""
    except OSError:
        pass
    return "running"
