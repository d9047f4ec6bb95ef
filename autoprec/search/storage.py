"""Open the storage of a study, and say in one line what is wrong with it."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from optuna.exceptions import StorageInternalError
from optuna.storages import RDBStorage
from sqlalchemy.exc import IntegrityError, OperationalError, ProgrammingError, SQLAlchemyError

from autoprec.errors import StudyError, UsageError
from autoprec.search.database_urls import dialect_of, parse_url, shown_url, sqlite_path
from autoprec.search.locks import alone, alone_on_server
from autoprec.search.network_folders import refuse_network_folder

__all__ = [
    "open_storage",
    "opened",
    "opened_alone",
    "close_storage",
    "storage_errors",
    "sqlite_url",
    "try_storage",
]

SQLITE_WAIT_SECONDS = 60
CONNECT_SECONDS = 30
"""For which a server may say nothing; libpq itself waits for as long as the system does, minutes."""
CREATE_ATTEMPTS, CREATE_PAUSE_SECONDS = 20, 0.25
"""Making the tables takes some hundred milliseconds."""


def sqlite_url(path: Path) -> str:
    return f"sqlite:///{path}"


def open_storage(url: str) -> RDBStorage:
    """Open an RDB storage by URL.

    Raises:
        UsageError: not a database URL, a dialect that Optuna does not store studies in, or an SQLite file on a network
            file system.
        StudyError: the database cannot be reached, or is of another Optuna. Of its URL a message holds scheme, host,
            port and database name alone.
    """
    parsed = parse_url(url)
    refuse_network_folder(url)
    dialect = dialect_of(url)
    wait: dict[str, Any] = {"connect_args": {"timeout": SQLITE_WAIT_SECONDS}}
    if dialect != "sqlite":
        limit = {} if "connect_timeout" in parsed.query else {"connect_timeout": CONNECT_SECONDS}
        wait = {"pool_pre_ping": True, "connect_args": limit}
    try:
        storage = _create(_with_driver(url), wait)
    except ImportError as error:
        how = "; pip install 'autoprec[postgresql]'" if dialect == "postgresql" else ""
        driver = error.name or "of this dialect"
        raise UsageError(f"storage {dialect}: the driver {driver} is not installed{how}") from None
    except (SQLAlchemyError, StorageInternalError, RuntimeError, ValueError, TypeError, OSError) as error:
        reason = _reason(error) or f"cannot be opened ({type(error).__name__})"
        raise StudyError(f"storage {shown_url(url)}: {reason}") from None
    if dialect == "sqlite":
        _let_readers_be(storage)
    return storage


def try_storage(url: str) -> None:
    """Open a storage and close it, so that one that cannot be used is told before hours of other work.

    Raises:
        UsageError, StudyError: as `open_storage`.
    """
    path = sqlite_path(url)
    if path is not None and not Path(path).exists() and os.access(Path(path).parent, os.W_OK):
        refuse_network_folder(url)  # the file is made by whoever needs it
        return
    with opened(url):
        pass


def _create(url: str, engine_kwargs: dict[str, Any]) -> RDBStorage:
    """Open a database; where another process makes the tables of an empty one at the same time, once they are there."""
    for _ in range(CREATE_ATTEMPTS):
        try:
            return RDBStorage(url, engine_kwargs=engine_kwargs)
        except (IntegrityError, OperationalError, ProgrammingError) as error:
            is_race = isinstance(error, IntegrityError) or "already exists" in str(error)
            if not is_race:
                raise
            time.sleep(CREATE_PAUSE_SECONDS)
    return RDBStorage(url, engine_kwargs=engine_kwargs)


def _with_driver(url: str) -> str:
    """Name psycopg 3 where the URL names no driver of PostgreSQL, whatever this SQLAlchemy would take."""
    scheme, rest = url.split(":", maxsplit=1)
    return f"postgresql+psycopg:{rest}" if scheme.lower() == "postgresql" else url


def _let_readers_be(storage: RDBStorage) -> None:
    """Write ahead in a log beside the file: whoever reads the study, for how long ever, keeps no trial waiting."""
    with contextlib.suppress(SQLAlchemyError), storage.engine.connect() as connection:  # not on every file system
        connection.exec_driver_sql("PRAGMA journal_mode=WAL")


@contextlib.contextmanager
def opened(url: str) -> Iterator[RDBStorage]:
    """Open a storage, and close it at the end; what goes wrong with it meanwhile is one line.

    Raises:
        UsageError, StudyError: as `open_storage` and `storage_errors`.
    """
    with storage_errors(url):
        storage = open_storage(url)
        try:
            yield storage
        finally:
            close_storage(storage)


@contextlib.contextmanager
def opened_alone(url: str, folder: Path, study_name: str) -> Iterator[RDBStorage]:
    """Open a storage for a search, which no other one on the study or with the folder disturbs.

    Raises:
        UsageError, StudyError: as `opened`; another search is running.
    """
    with alone(folder, url, study_name), opened(url) as storage, alone_on_server(storage, study_name):
        yield storage


def close_storage(storage: RDBStorage) -> None:
    """Close what is open; SQLite then moves its log into the file. The storage opens again when it is used."""
    storage.remove_session()
    storage.engine.dispose()


@contextlib.contextmanager
def storage_errors(url: str) -> Iterator[None]:
    """Turn what a database or a full disk raises into one line.

    Raises:
        StudyError: what is wrong, and that the finished trials are kept.
    """
    try:
        yield
    except (SQLAlchemyError, StorageInternalError, KeyError, OSError) as error:
        reason = _reason(error)
        if reason is None and isinstance(error, OSError | KeyError):
            raise
        reason = reason or f"cannot be written ({type(error.__cause__ or error).__name__})"
        kept = "; all finished trials are kept, and the same command goes on where it stopped"
        is_damaged = reason in _DAMAGES.values()
        raise StudyError(f"storage {shown_url(url)}: {reason}{'' if is_damaged else kept}") from error


NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def _reason(error: BaseException) -> str | None:
    """Say in a few words what is wrong with the disk or the database; None where that is not known."""
    parts: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in parts:
        parts.append(link)
        link = getattr(link, "orig", None) or link.__cause__
    if any(isinstance(part, OSError) and part.errno in NO_ROOM for part in parts):
        return "there is no room left on the disk"
    if all(isinstance(part, OSError) for part in parts):
        return None
    text = " ".join(str(part) for part in parts).lower()
    if all(isinstance(part, KeyError) for part in parts) and DELETED not in text:
        return None
    for words, reason in (_DAMAGES | _REASONS).items():
        if words in text:
            return reason
    return None


DELETED = "record does not exist"
_DAMAGES = {
    "malformed": "the file is damaged",
    "not a database": "the file is no database",
    "no such table": "a table of Optuna's is missing; the file is damaged, or another program's",
    "no such column": "a table of Optuna's has other columns; the study is of another Optuna",
    "is no longer compatible with the table schema": "the study is of another Optuna than the one installed here;"
    " install that, or convert a copy of it with `optuna storage upgrade`",
    DELETED: "the study, or a trial of it, has been deleted meanwhile",
}
"""Likewise, where nothing can be promised of the trials."""

_REASONS = {
    "is full": "there is no room left on the disk",
    "is locked": f"another program has kept it locked for {SQLITE_WAIT_SECONDS} s",
    "readonly": "it cannot be written (read-only, or its folder has been removed)",
    "disk i/o error": "the disk cannot be written (I/O error; it may be full, or the folder has been removed)",
    "unable to open database file": "cannot be opened (no such folder, no right to it, or no file of a database)",
    "password authentication failed": "the server refuses this user or password",
    "access denied": "the server refuses this user or password",
    "no password supplied": "the server asks for a password; PGPASSWORD or PGPASSFILE can hold it",
    "no pg_hba.conf entry": "the server does not admit this user from this machine",
    "too many": "the server has no connection left",
    "connection refused": "cannot be opened (nothing answers at that host and port)",
    "failed to resolve host": "cannot be opened (there is no host of that name)",
    "could not translate host name": "cannot be opened (there is no host of that name)",
    "name or service not known": "cannot be opened (there is no host of that name)",
    "timeout expired": "cannot be opened (the server does not answer)",
    "timed out": "cannot be opened (the server does not answer)",
    "unknown database": "the server has no such database",
    "does not exist": "the server has no such database, table or user",
    "server closed the connection": "the server has closed the connection",
    "permission denied": "the server or the system does not allow it to this user",
}
"""What SQLite, PostgreSQL, MySQL and Optuna say, and what that means here; the first that fits is told."""
