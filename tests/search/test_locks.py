"""Locks: no link is followed, no name in a shared folder can be taken by others, and written files honour the umask."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from optuna.storages import RDBStorage

from autoprec.errors import StudyError
from autoprec.policy import write_atomically
from autoprec.search import locks
from autoprec.search.locks import alone, in_turn

SERVER = "postgresql://me:s3cret@host/db"


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in the place of the system's temporary one."""
    (folder := tmp_path / "shared").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.fixture
def output(tmp_path: Path) -> Path:
    (folder := tmp_path / "output").mkdir()
    return folder


@pytest.mark.parametrize("link", [os.symlink, os.link], ids=["symbolic", "hard"])
def test_a_lock_that_is_a_link_is_refused_and_its_target_kept(link, output: Path, tmp_path: Path) -> None:
    (precious := tmp_path / "precious").write_text("precious")
    link(precious, output / ".lock")
    with pytest.raises(StudyError, match=r"lock of a search cannot be written .*link"), alone(output, SERVER, "s"):
        pass
    assert precious.read_text() == "precious"


def test_a_lock_that_is_a_pipe_is_refused_at_once(output: Path) -> None:
    os.mkfifo(output / ".lock")
    with pytest.raises(StudyError, match="no file"), alone(output, SERVER, "s"):
        pass


def test_locks_in_the_shared_folder_are_in_one_of_the_users_own(shared: Path, output: Path) -> None:
    with alone(output, SERVER, "s"):
        (own,) = shared.iterdir()
        assert own.stat().st_uid == os.getuid()
        assert stat.S_IMODE(own.stat().st_mode) == 0o700
        assert len(list(own.iterdir())) == 1


@pytest.mark.parametrize("kind", ["link", "file", "writable"])
def test_a_folder_for_locks_that_is_somebody_elses_is_refused(kind: str, shared: Path, output: Path) -> None:
    own = shared / f"autoprec-{os.getuid()}"
    if kind == "link":
        (shared / "target").mkdir()
        own.symlink_to(shared / "target")
    elif kind == "file":
        own.write_text("")
    else:
        own.mkdir()
        own.chmod(0o777)
    with pytest.raises(StudyError, match=r"folder for locks (is not this user's own|cannot be made)"):  # noqa: SIM117
        with alone(output, SERVER, "s"):
            pass


def test_the_password_does_not_decide_the_name_of_a_lock(shared: Path, output: Path) -> None:
    with (
        alone(output, SERVER, "s"),
        pytest.raises(StudyError, match="on s"),
        alone(shared, SERVER.replace("s3cret", "other"), "s"),
    ):
        pass


@pytest.mark.parametrize("umask", [0o077, 0o022, 0o002])
def test_what_is_written_honours_the_umask(umask: int, output: Path) -> None:
    before = os.umask(umask)
    try:
        write_atomically(output / "policy.json", "{}")
        with alone(output, f"sqlite:///{output / 'study.db'}", "s"):
            modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in output.iterdir()}
    finally:
        os.umask(before)
    assert len(modes) == 3
    assert set(modes.values()) == {0o666 & ~umask}


def test_a_file_that_is_there_keeps_its_mode(output: Path) -> None:
    (path := output / "policy.json").write_text("")
    path.chmod(0o640)
    write_atomically(path, "{}")
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_a_name_as_long_as_the_system_takes_is_written(output: Path) -> None:
    write_atomically(path := output / ("n" * 250 + ".json"), "{}")
    assert path.read_text() == "{}"
    assert list(output.iterdir()) == [path]


def test_a_turn_that_another_process_keeps_is_not_waited_for_without_end(
    output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locks, "TURN_SECONDS", 0.3)
    storage = RDBStorage(f"sqlite:///{output}/study.db")
    holds = (
        "import sys; from optuna.storages import RDBStorage; from autoprec.search.locks import in_turn\n"
        "with in_turn(RDBStorage(sys.argv[1]), 's'): print(flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", holds, storage.url]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        os.kill(holder.pid, signal.SIGSTOP)
        try:
            with pytest.raises(StudyError, match="has kept the others from taking a trial"), in_turn(storage, "s"):
                pass
        finally:
            holder.kill()
    with in_turn(storage, "s"):
        pass
