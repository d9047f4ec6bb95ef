"""Open the storage of a study and keep its password out of every message."""

from __future__ import annotations

import contextlib
import errno
import getpass
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from optuna.exceptions import StorageInternalError
from optuna.storages import RDBStorage
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, SQLAlchemyError

from autoprec.errors import StudyError, UsageError, did_you_mean
from autoprec.policy import content_hash

__all__ = ["open_storage", "close_storage", "storage_errors", "hide_password", "sqlite_url", "alone"]

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
        storage = RDBStorage(url, engine_kwargs=wait)
    except ImportError as error:
        raise UsageError(f"storage {dialect}: the driver {error.name or 'of this dialect'} is not installed") from None
    except (SQLAlchemyError, StorageInternalError, ValueError, OSError) as error:
        reason = _reason(error) or f"cannot be opened ({type(error).__name__})"
        raise StudyError(f"storage {hide_password(url)}: {reason}") from None
    if dialect == "sqlite":
        _let_readers_be(storage)
    return storage


def _let_readers_be(storage: RDBStorage) -> None:
    """Write ahead in a log beside the file: whoever reads the study, for how long ever, keeps no trial waiting."""
    with contextlib.suppress(SQLAlchemyError), storage.engine.connect() as connection:  # not on every file system
        connection.exec_driver_sql("PRAGMA journal_mode=WAL")


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


@contextlib.contextmanager
def alone(folder: Path, storage: str, study_name: str) -> Iterator[None]:
    """Hold the locks of an output folder and of a study, so that a RUNNING trial in the study is known to be stale.

    The study's lock is in the folder of its SQLite file, for another database in that of temporary files: it holds
    for searches of one machine.

    Raises:
        StudyError: another search holds one; its process is named.
    """
    with _held(folder / ".lock", f"in {folder.name}"), _held(_study_lock(storage, study_name), f"on {study_name}"):
        yield


@contextlib.contextmanager
def _held(path: Path, where: str) -> Iterator[None]:
    try:
        file = path.open("a+")
    except OSError as error:
        raise StudyError(f"{path.name}: the lock of a search cannot be written ({error.strerror})") from None
    with file:
        if not _lock(file):
            raise StudyError(f"another search{_holder(file)} is running {where}; wait for it, or give another -o")
        with contextlib.suppress(OSError):  # a full disk: the lock holds without the number
            os.ftruncate(file.fileno(), 0)
            os.write(file.fileno(), str(os.getpid()).encode())
        yield


def _study_lock(storage: str, study_name: str) -> Path:
    file = make_url(storage).database if storage.startswith("sqlite") else None
    if file:
        return Path(file).parent / f".{Path(file).name}.{content_hash(study_name)[:10]}.lock"
    name = content_hash(f"{storage}\0{study_name}")[:20]
    return Path(tempfile.gettempdir()) / f"autoprec-{getpass.getuser()}-{name}.lock"


def _holder(file: IO[str]) -> str:
    file.seek(0)
    number = file.read(20).strip()
    return f" (process {number})" if number.isdigit() else ""


def _lock(file: IO[str]) -> bool:
    if os.name != "posix":
        return True
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return True
