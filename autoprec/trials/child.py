"""A worker process as its parent sees it: how it is started, talked to, watched and ended."""

from __future__ import annotations

import contextlib
import fcntl
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import types
from collections.abc import Iterator
from dataclasses import asdict
from multiprocessing import connection, reduction
from typing import IO, Any

from autoprec.tasks.source import TaskSource
from autoprec.trials.failures import scrub, tail
from autoprec.trials.process import serve

__all__ = ["WorkerProcess"]

MAX_STDERR = 4_000
STACK_SECONDS = 0.3
"""How long a hung process gets to write where it hangs, before it is killed."""

_START_LOCK = threading.Lock()


class WorkerProcess:
    """One process from the fork server, with its stderr in a file of its own."""

    def __init__(self, source: TaskSource, num_threads: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["autoprec.trials.preload"])
        self._stderr: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  (closed by `end`)
        flags = fcntl.fcntl(self._stderr, fcntl.F_GETFL)
        fcntl.fcntl(self._stderr, fcntl.F_SETFL, flags | os.O_APPEND)
        self._connection, theirs = context.Pipe()
        about = {"source": asdict(source), "num_threads": num_threads, "path": sys.path, "search_pid": os.getpid()}
        self._process = context.Process(
            target=_serve,
            args=(theirs, _Descriptor(self._stderr.fileno()), json.dumps(about)),
            name="autoprec-trials",
            daemon=True,
        )
        with _without_main_module():
            self._process.start()
        theirs.close()

    @property
    def pid(self) -> int | None:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.is_alive()

    def ask(self, message: dict[str, Any], *, timeout_seconds: float | None) -> dict[str, Any]:
        """Send a message and return the answer.

        Raises:
            TimeoutError, EOFError: no answer in time; the process is gone.
        """
        try:
            self._connection.send_bytes(json.dumps(message).encode())
        except OSError:
            raise EOFError from None
        return self.receive(timeout_seconds=timeout_seconds)

    def receive(self, *, timeout_seconds: float | None) -> dict[str, Any]:
        ready = connection.wait([self._connection, self._process.sentinel], timeout_seconds)
        if not ready:
            raise TimeoutError
        if self._connection not in ready and not self._connection.poll():
            raise EOFError
        try:
            answer: dict[str, Any] = json.loads(self._connection.recv_bytes())
        except OSError:
            raise EOFError from None
        return answer

    def mark_stderr(self) -> None:
        """Let what comes from here on be this trial's; what older trials wrote is dropped."""
        self._stderr.truncate(0)

    def describe_exit(self) -> str:
        self._process.join(2.0)
        code = self._process.exitcode
        if code is None:
            return "it closed its connection"
        if code < 0:
            with contextlib.suppress(ValueError):
                return f"signal {signal.Signals(-code).name}"
        return f"exit code {code}"

    def kill(self) -> None:
        """Kill the process and its children; whoever waits for its answer gets an EOFError."""
        if self.pid is not None:
            _signal_group(self.pid)

    def end(self, *, with_stack: bool) -> str:
        if self._process.is_alive() and self.pid is not None:
            if with_stack:
                _signal(self.pid, signal.SIGUSR1)
                self._process.join(STACK_SECONDS)
            _signal_group(self.pid)
            self._process.join(5.0)
        elif self.pid is not None:
            _signal_group(self.pid)
        self._connection.close()
        text = self._read_stderr()
        self._stderr.close()
        return text

    def _read_stderr(self) -> str:
        size = self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(0, size - 2 * MAX_STDERR))
        lines = self._stderr.read().decode("utf-8", "replace").splitlines()
        told = [line for line in lines if not line.startswith("Extension modules:")]  # faulthandler's last, long one
        return tail(scrub("\n".join(told).strip()), max_characters=MAX_STDERR)


class _Descriptor:
    """A file descriptor that travels to the new process."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> tuple[Any, ...]:
        return (_detach, (reduction.DupFd(self.number),))


def _detach(descriptor: Any) -> int:
    number: int = descriptor.detach()
    return number


def _serve(theirs: connection.Connection, stderr: int, first: str) -> None:
    serve(theirs, stderr, json.loads(first))


@contextlib.contextmanager
def _without_main_module() -> Iterator[None]:
    """Hide the user's script while a process starts: it would be run again there, with all its effects."""
    with _START_LOCK:
        main = sys.modules["__main__"]
        sys.modules["__main__"] = types.ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = main


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(OSError):
        os.kill(pid, number)


def _signal_group(pid: int) -> None:
    """Kill the process and its children: it leads a group of its own."""
    with contextlib.suppress(OSError):
        os.killpg(pid, signal.SIGKILL)
    _signal(pid, signal.SIGKILL)
