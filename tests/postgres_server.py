"""A PostgreSQL server of a test's own, in a temporary folder, on a free port of the loopback."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

START_SECONDS = 60


def find_programs() -> Path | None:
    """Return the folder with `initdb` and `postgres`; Debian keeps them off the path."""
    found = shutil.which("initdb")
    folders = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: path.parent.name)
    places = [*([Path(found).resolve().parent] if found else []), *reversed(folders)]
    return next((place for place in places if (place / "postgres").exists() and (place / "initdb").exists()), None)


@contextmanager
def postgres_server(programs: Path, *, is_safe: bool = False) -> Iterator[str]:
    """Start a server and yield the URL of its database; the password is needed.

    What it keeps need not survive a power cut, unless it `is_safe`, as a real one is.
    """
    with tempfile.TemporaryDirectory(prefix="autoprec-pg-") as name:
        folder = Path(name)
        (folder / "password").write_text("s3cret")
        owner = {}
        if os.geteuid() == 0:  # the server refuses to run as root
            nobody = pwd.getpwnam("nobody")
            for path in (folder, folder / "password"):
                os.chown(path, nobody.pw_uid, nobody.pw_gid)
            owner = {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}
        options = [
            "-U",
            "autoprec",
            "-A",
            "scram-sha-256",
            f"--pwfile={folder / 'password'}",
            "-E",
            "UTF8",
            "--no-sync",
        ]
        made = subprocess.run(
            [programs / "initdb", "-D", folder / "data", *options], capture_output=True, text=True, cwd="/", **owner
        )
        assert made.returncode == 0, made.stderr
        port = free_port()
        settings = [
            "-c",
            "listen_addresses=127.0.0.1",
            "-c",
            f"fsync={'on' if is_safe else 'off'}",
            "-k",
            str(folder),
            "-p",
            str(port),
        ]
        with (folder / "log").open("w") as log:
            server = subprocess.Popen(
                [programs / "postgres", "-D", folder / "data", *settings], stdout=log, stderr=log, cwd="/", **owner
            )
        try:
            wait_for(port, server, folder / "log")
            yield f"postgresql://autoprec:s3cret@127.0.0.1:{port}/postgres"
        finally:
            server.send_signal(signal.SIGINT)  # without waiting for whoever is connected
            server.wait(30)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        number: int = listener.getsockname()[1]
        return number


def wait_for(port: int, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while server.poll() is None and time.monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            time.sleep(0.1)
    raise AssertionError(f"no server within {START_SECONDS} s\n{log.read_text()}")
