"""What the processes on one study agree on: how many trials it is to have, and that its database can be shared."""

from __future__ import annotations

import time

from optuna.storages import BaseStorage
from optuna.study import Study, get_all_study_names
from optuna.trial import TrialState

from autoprec.errors import StudyError, UsageError, did_you_mean
from autoprec.search.database_urls import DIALECTS, dialect_of, sqlite_path
from autoprec.search.events import Events
from autoprec.search.presence import GRACE, Presence

__all__ = ["get_total", "require_one_machine", "require_study", "require_turns", "set_total"]

TOTAL = "autoprec:n_trials"
"""User attribute of the study: the finished trials that it is to have."""


def set_total(study: Study, n_trials: int) -> None:
    study.set_user_attr(TOTAL, n_trials)


def get_total(study: Study) -> int:
    """Return how many finished trials the study is to have, 0 where nobody has said it."""
    return int(study.user_attrs.get(TOTAL, 0))


def require_study(storage: BaseStorage, name: str) -> None:
    """Refuse a study that is not there.

    Raises:
        UsageError: the nearest names are told.
    """
    names = get_all_study_names(storage)
    if name not in names:
        raise UsageError(
            f"no study {name!r} in the storage{did_you_mean(name, names)}; `autoprec search` with the same --storage"
            " and --study-name begins it, or give --n-trials and the worker does"
        )


def require_turns(url: str) -> None:
    """Refuse a database on which processes of several machines cannot take turns.

    Raises:
        UsageError: it is neither SQLite nor PostgreSQL.
    """
    dialect = dialect_of(url)
    if dialect in DIALECTS and dialect not in ("sqlite", "postgresql"):
        raise UsageError(
            f"storage {dialect}: one search can use it, workers cannot: they take turns by a lock of the database;"
            " give postgresql://USER@HOST/DATABASE, or sqlite:///FILE on one machine"
        )


def require_one_machine(presence: Presence, url: str, events: Events) -> None:
    """Refuse a study in an SQLite file that another machine, or another container, runs; wait until that is sure.

    Raises:
        StudyError: it shows signs of life.
    """
    if sqlite_path(url) is None:
        return
    wait = (GRACE + 1) * presence.heartbeat_seconds
    deadline = time.monotonic() + wait
    is_told = False
    while presence.others_elsewhere(presence.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))):
        if not is_told:
            events.note(f"a process of another machine may be on this study; waiting up to {wait:g} s for a sign of it")
            is_told = True
        if time.monotonic() > deadline:
            raise StudyError(
                "the study's SQLite file is in use by a process of another machine or container; SQLite is for the"
                " processes of one machine: use --storage postgresql://USER@HOST/DATABASE"
            )
        time.sleep(min(1.0, presence.heartbeat_seconds / 4))
