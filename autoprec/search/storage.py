"""Open the storage of a study and keep its password out of every message."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from optuna.storages import RDBStorage
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, SQLAlchemyError

from autoprec.errors import StudyError, UsageError, did_you_mean

__all__ = ["open_storage", "hide_password", "sqlite_url", "alone"]

DIALECTS = ("sqlite", "postgresql", "mysql", "mariadb")
SQLITE_WAIT_SECONDS = 60


def sqlite_url(path: Path) -> str:
    return f"sqlite:///{path}"


def hide_password(url: str) -> str:
    """Return the URL with its password as `***`; what is no URL comes back as "storage"."""
    try:
        return make_url(url).render_as_string(hide_password=True)
    except ArgumentError:
        return "storage"


def open_storage(url: str) -> RDBStorage:
    """Open an RDB storage by URL.

    Raises:
        UsageError: not a database URL, or a dialect that Optuna does not store studies in.
        StudyError: the database cannot be reached. No message holds a password.
    """
    dialect = url.partition(":")[0].partition("+")[0].lower()
    if "://" not in url or dialect not in DIALECTS:
        shown = dialect[:40] if "://" in url else url[:60] if "@" not in url else "..."
        raise UsageError(
            f"storage {shown!r} is not a database URL such as sqlite:///study.db or postgresql://user@host/database; "
            f"dialects: {', '.join(DIALECTS)}{did_you_mean(dialect, DIALECTS)}"
        )
    wait = {"connect_args": {"timeout": SQLITE_WAIT_SECONDS}} if dialect == "sqlite" else {"pool_pre_ping": True}
    try:
        return RDBStorage(url, engine_kwargs=wait)
    except ImportError as error:
        raise UsageError(f"storage {dialect}: the driver {error.name or 'of this dialect'} is not installed") from None
    except (SQLAlchemyError, ValueError, OSError) as error:
        raise StudyError(f"storage {hide_password(url)}: cannot be opened ({type(error).__name__})") from None


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Hold the lock of an output folder, so that a RUNNING trial in its study is known to be stale.

    Raises:
        StudyError: another search holds it.
    """
    path = folder / ".lock"
    with path.open("a+") as file:
        if not _lock(file):
            raise StudyError(f"another search is running in {folder.name}; wait for it, or give another -o")
        yield


def _lock(file: IO[str]) -> bool:
    if os.name != "posix":
        return True
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
