"""Open the storage of a study and keep its password out of every message."""

from __future__ import annotations

import contextlib
import errno
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from optuna.exceptions import StorageInternalError
from optuna.storages import RDBStorage
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, IntegrityError, OperationalError, ProgrammingError, SQLAlchemyError

from autoprec.errors import StudyError, UsageError, did_you_mean
from autoprec.search.locks import alone, alone_on_server
from autoprec.search.network_folders import refuse_network_folder

__all__ = [
    "DIALECTS",
    "dialect_of",
    "open_storage",
    "opened",
    "opened_alone",
    "close_storage",
    "storage_errors",
    "hide_password",
    "sqlite_url",
    "without_password",
]

DIALECTS = ("sqlite", "postgresql", "mysql", "mariadb")
SQLITE_WAIT_SECONDS = 60
CREATE_ATTEMPTS, CREATE_PAUSE_SECONDS = 20, 0.25
"""Making the tables takes some hundred milliseconds."""


def sqlite_url(path: Path) -> str:
    return f"sqlite:///{path}"


def dialect_of(url: str) -> str:
    """Return a database URL's dialect without its driver, whether there is such a one or not."""
    return url.partition(":")[0].partition("+")[0].lower()


def hide_password(url: str) -> str:
    """Return the URL with its password as `***`; what is no URL comes back as "storage"."""
    try:
        return make_url(url).render_as_string(hide_password=True)
    except ArgumentError:
        return "storage"


def without_password(url: str) -> tuple[str, str | None]:
    """Return the URL without its password, and that."""
    try:
        parsed = make_url(url)
    except ArgumentError:
        return url, None
    password = parsed.password
    bare = URL.create(parsed.drivername, parsed.username, None, parsed.host, parsed.port, parsed.database, parsed.query)
    return (url, None) if password is None else (bare.render_as_string(hide_password=False), str(password))


def open_storage(url: str) -> RDBStorage:
    """Open an RDB storage by URL.

    Raises:
        UsageError: not a database URL, a dialect that Optuna does not store studies in, or an SQLite file on a network
            file system.
        StudyError: the database cannot be reached. No message holds a password.
    """
    dialect = dialect_of(url)
    if "://" not in url or dialect not in DIALECTS:
        shown = dialect[:40] if "://" in url else url[:60] if "@" not in url else "..."
        raise UsageError(
            f"storage {shown!r} is not a database URL such as sqlite:///study.db or postgresql://user@host/database; "
            f"dialects: {', '.join(DIALECTS)}{did_you_mean(dialect, DIALECTS)}"
        )
    refuse_network_folder(url)
    wait = {"connect_args": {"timeout": SQLITE_WAIT_SECONDS}} if dialect == "sqlite" else {"pool_pre_ping": True}
    try:
        storage = _create(_with_driver(url), wait)
    except ImportError as error:
        how = "; pip install 'autoprec[postgresql]'" if dialect == "postgresql" else ""
        driver = error.name or "of this dialect"
        raise UsageError(f"storage {dialect}: the driver {driver} is not installed{how}") from None
    except (SQLAlchemyError, StorageInternalError, ValueError, OSError) as error:
        reason = _reason(error) or f"cannot be opened ({type(error).__name__})"
        raise StudyError(f"storage {hide_password(url)}: {reason}") from None
    if dialect == "sqlite":
        _let_readers_be(storage)
    return storage


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
    except (SQLAlchemyError, StorageInternalError, OSError) as error:
        reason = _reason(error)
        if reason is None and isinstance(error, OSError):
            raise
        reason = reason or f"cannot be written ({type(error.__cause__ or error).__name__})"
        kept = "all finished trials are kept, and the same command goes on where it stopped"
        raise StudyError(f"storage {hide_password(url)}: {reason}; {kept}") from error


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
    text = " ".join(str(part) for part in parts).lower()
    for words, reason in _REASONS.items():
        if words in text:
            return reason
    return None


_REASONS = {
    "is full": "there is no room left on the disk",
    "is locked": f"another program has kept it locked for {SQLITE_WAIT_SECONDS} s",
    "readonly": "it cannot be written (read-only)",
    "disk i/o error": "the disk cannot be written (I/O error; it may be full)",
    "malformed": "the file is damaged",
    "not a database": "the file is no database",
}
"""What SQLite says, and what that means here."""
