"""The locks of a study: one search at a time, and one process at a time that takes a trial from it.

A file beside an SQLite database, an advisory lock of a PostgreSQL server: either is let go of by the system when its
holder ends, however that ends.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from optuna.storages import BaseStorage, RDBStorage
from sqlalchemy import Connection, text
from sqlalchemy.exc import OperationalError, SQLAlchemyError

from autoprec.errors import StudyError
from autoprec.policy import content_hash
from autoprec.search.database_urls import shown_url, sqlite_path

__all__ = ["alone", "alone_on_server", "in_turn"]

TURN_SECONDS = 300
"""How long a process waits for its turn to take a trial: the longest is the profile of a task."""
LOOK_SECONDS = 0.02
"""Between two looks at a locked file: the system has no wait for one that ends by itself."""


@contextlib.contextmanager
def alone(folder: Path, storage: str, study_name: str) -> Iterator[None]:
    """Hold the locks of an output folder and of a study, against other searches of this machine.

    Raises:
        StudyError: another search holds one; its process is named.
    """
    with _held(folder / ".lock", f"in {folder.name}"), _held(_lock_file(storage, study_name), f"on {study_name}"):
        yield


@contextlib.contextmanager
def alone_on_server(storage: BaseStorage, study_name: str) -> Iterator[None]:
    """Hold the lock of a study on a database server, against searches of other machines; elsewhere do nothing.

    Raises:
        StudyError: another search holds it.
    """
    server = _server(storage)
    if server is None:
        yield
        return
    with server.engine.connect() as connection:
        key = _key("search", study_name)
        if not _run(connection, "SELECT pg_try_advisory_lock(:key)", key):
            raise StudyError(f"another search is running on {study_name}, on another machine; wait for it")
        with _let_go_of(connection, key):
            yield


@contextlib.contextmanager
def in_turn(storage: BaseStorage, study_name: str, *, purpose: str = "turn") -> Iterator[None]:
    """Wait until no other process does the same with the study, and keep the others waiting meanwhile.

    Raises:
        StudyError: one has kept its turn for `TURN_SECONDS`.
    """
    server = _server(storage)
    if server is not None:
        key = _key(purpose, study_name)
        with server.engine.connect() as connection:
            _wait(connection, key, study_name)
            with _let_go_of(connection, key):
                yield
    elif isinstance(storage, RDBStorage) and os.name == "posix":
        path = _lock_file(storage.url, study_name)
        with _open(path.with_stem(f"{path.stem}.{purpose}")) as file:
            ends = time.monotonic() + TURN_SECONDS
            while not _lock(file):
                if time.monotonic() >= ends:
                    raise _turn_error(study_name)
                time.sleep(LOOK_SECONDS)
            yield
    else:
        yield


def _server(storage: BaseStorage) -> RDBStorage | None:
    """Return the storage where it is on a server that has advisory locks."""
    is_server = isinstance(storage, RDBStorage) and storage.engine.dialect.name == "postgresql"
    return storage if is_server else None  # type: ignore[return-value]


def _key(purpose: str, study_name: str) -> int:
    """Return PostgreSQL's key of a lock: a signed number of 64 bits."""
    return int(content_hash(f"autoprec {purpose} {study_name}")[:16], 16) - 2**63


@contextlib.contextmanager
def _let_go_of(connection: Connection, key: int) -> Iterator[None]:
    """Unlock at the end; a connection that cannot is closed, which unlocks as well."""
    try:
        yield
    finally:
        try:
            _run(connection, "SELECT pg_advisory_unlock(:key)", key)
        except SQLAlchemyError:
            connection.invalidate()


def _run(connection: Connection, statement: str, key: int) -> bool:
    """Run a statement in a transaction of its own: the lock is the connection's, and no transaction stays open."""
    answer = connection.execute(text(statement), {"key": key}).scalar()
    connection.commit()
    return bool(answer)


def _wait(connection: Connection, key: int, study_name: str) -> None:
    try:
        connection.execute(text(f"SET LOCAL lock_timeout = '{TURN_SECONDS}s'"))
        _run(connection, "SELECT pg_advisory_lock(:key)", key)
    except OperationalError as error:
        if getattr(error.orig, "sqlstate", "") != "55P03":  # lock_not_available, from PostgreSQL's appendix A
            raise
        raise _turn_error(study_name) from None


def _turn_error(study_name: str) -> StudyError:
    return StudyError(f"another worker of {study_name} has kept the others from taking a trial for {TURN_SECONDS} s")


@contextlib.contextmanager
def _held(path: Path, where: str) -> Iterator[None]:
    with _open(path) as file:
        if not _lock(file):
            raise StudyError(f"another search{_holder(file)} is running {where}; wait for it, or give another -o")
        with contextlib.suppress(OSError):  # a full disk: the lock holds without the number
            os.ftruncate(file.fileno(), 0)
            os.write(file.fileno(), str(os.getpid()).encode())
        yield


def _open(path: Path) -> IO[str]:
    """Open a lock file, made where there is none; what somebody else has put in its place is not touched.

    Raises:
        StudyError: it is a link, no file, or cannot be written.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    try:
        number = os.open(path, flags, 0o666)
    except OSError as error:
        reasons = {errno.ELOOP: "it is a symbolic link", errno.ENOENT: "its folder is not there any more"}
        reason = reasons.get(error.errno or 0, error.strerror)
        raise StudyError(f"{path.name}: the lock of a search cannot be written ({reason})") from None
    found = os.fstat(number)
    if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
        os.close(number)
        raise StudyError(f"{path.name}: the lock of a search cannot be written (it is a link, or no file)")
    return os.fdopen(number, "r+", encoding="utf-8", errors="replace")


def _lock_file(storage: str, study_name: str) -> Path:
    file = sqlite_path(storage)
    if file is not None:
        return Path(file).parent / f".{Path(file).name[:100]}.{content_hash(study_name)[:10]}.lock"
    study = f"{shown_url(storage)}\0{study_name}"
    return _own_folder() / f"{content_hash(study)}.lock"


def _own_folder() -> Path:
    """Return a folder for locks that nobody else can write to: in the shared one, names that are known can be taken.

    Raises:
        StudyError: somebody else has one of its name, or it cannot be made.
    """
    owner = os.getuid() if hasattr(os, "getuid") else 0
    folder = Path(tempfile.gettempdir()) / f"autoprec-{owner}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise StudyError(f"{folder.name}: the folder for locks cannot be made ({error.strerror})") from None
    if os.name == "posix" and (not stat.S_ISDIR(found.st_mode) or found.st_uid != owner or found.st_mode & 0o022):
        raise StudyError(f"{folder.name}: the folder for locks is not this user's own; let TMPDIR name another place")
    return folder


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
