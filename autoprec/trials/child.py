"""A worker process as its parent sees it: how it is started, talked to, watched and ended."""

from __future__ import annotations

import contextlib
import fcntl
import json
import multiprocessing
import os
import select
import signal
import sys
import tempfile
import threading
import time
import types
from collections.abc import Iterator
from dataclasses import asdict
from multiprocessing import connection, forkserver, reduction
from multiprocessing.process import BaseProcess
from typing import IO, Any

from autoprec.tasks.source import TaskSource
from autoprec.trials.failures import scrub, tail
from autoprec.trials.lifeline import as_parent
from autoprec.trials.process import serve

__all__ = ["WorkerProcess"]

MAX_STDERR = 4_000
STACK_SECONDS = 0.3
"""How long a hung process gets to write where it hangs, before it is killed."""

FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
"""Signals that a trial does not send itself: a person, a job system or the out-of-memory killer did."""
LOST_EXIT_CODE = 255
"""What multiprocessing reports where the fork server died with the process."""

ANSWER_SECONDS = 120.0
"""For which a fork server may load and start a process."""
START_ATTEMPTS, START_PAUSE_SECONDS = 40, 0.05
"""A fork server that was killed is not known to be gone before the system has taken it down."""

_START_LOCK = threading.Lock()


def _start(process: BaseProcess) -> None:
    """Start a process; where the fork server has just ended, or does not answer, with the next one."""
    for attempt in range(START_ATTEMPTS):
        watch = threading.Timer(ANSWER_SECONDS, _end_fork_server)
        watch.daemon = True
        watch.start()
        try:
            process.start()
            return
        except (ConnectionError, EOFError):
            if attempt == START_ATTEMPTS - 1:
                raise
            time.sleep(START_PAUSE_SECONDS)
        finally:
            watch.cancel()


def _end_fork_server() -> None:
    """Kill a fork server that was stopped, or hangs: whoever waits for it gets an error, and starts another."""
    pid = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    if pid is not None:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)


class WorkerProcess:
    """One process from the fork server, with its stderr in a file of its own."""

    def __init__(self, source: TaskSource, num_threads: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["autoprec.trials.preload"])
        self._stderr = _open_stderr()
        flags = fcntl.fcntl(self._stderr, fcntl.F_GETFL)
        fcntl.fcntl(self._stderr, fcntl.F_SETFL, flags | os.O_APPEND)
        self._connection, theirs = context.Pipe()
        self._number = 0
        about = {"source": asdict(source), "num_threads": num_threads, "path": sys.path, "search_pid": os.getpid()}
        self._process = context.Process(
            target=_serve,
            args=(theirs, _Descriptor(self._stderr.fileno()), json.dumps(about)),
            name="autoprec-trials",
            daemon=True,
        )
        self._num_out_of_memory = _count_out_of_memory()
        with _START_LOCK, _without_main_module(), as_parent():
            _stand_somewhere()
            _start(self._process)
        theirs.close()
        self._pidfd = _open_pidfd(self._process.pid)

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
        self._number += 1
        ends = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        try:
            self._connection.send_bytes(json.dumps({**message, "number": self._number}).encode())
        except OSError:
            raise EOFError from None
        while True:
            left = None if ends is None else max(0.0, ends - time.monotonic())
            answer = self.receive(timeout_seconds=left)
            if answer.get("number") == self._number:  # another is of an earlier message, or of nobody's
                return answer

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

    @property
    def was_ended_from_outside(self) -> bool:
        """Whether the end says nothing of what ran: a signal from elsewhere, or a fork server that ended or stopped."""
        code = self._process.exitcode
        if code is None and self._pidfd is not None:  # ended, and the fork server does not say how
            return bool(select.select([self._pidfd], [], [], 0)[0])
        return code is not None and (code == LOST_EXIT_CODE or -code in FROM_OUTSIDE)

    @property
    def was_ended_for_memory(self) -> bool:
        """Whether it was killed while the system's out-of-memory killer was at work."""
        return self._process.exitcode == -signal.SIGKILL and _count_out_of_memory() > self._num_out_of_memory

    def kill(self) -> None:
        """Kill the process and its children; whoever waits for its answer gets an EOFError."""
        if self.pid is not None and self._process.is_alive():  # it leads a group of its own, unless it has ended
            with contextlib.suppress(OSError):
                os.killpg(self.pid, signal.SIGKILL)
        self._signal(signal.SIGKILL)

    def end(self, *, with_stack: bool) -> str:
        """Kill the process, and let go of all that was held for it; return the last lines of its stderr."""
        if self._process.is_alive():
            if with_stack:
                self._signal(signal.SIGUSR1)
                self._process.join(STACK_SECONDS)
            self.kill()
            self._process.join(5.0)
        pidfd, self._pidfd = self._pidfd, None
        if pidfd is not None:
            os.close(pidfd)
        self._connection.close()
        text = self._read_stderr()
        self._stderr.close()
        return text

    def _signal(self, number: int) -> None:
        """Signal this process, and never another one that got its number since."""
        with contextlib.suppress(OSError):
            if self._pidfd is not None:
                signal.pidfd_send_signal(self._pidfd, number)
            elif self.pid is not None and self._process.is_alive():
                os.kill(self.pid, number)

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
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _stand_somewhere() -> None:
    """Leave a working folder that somebody has removed: multiprocessing starts nothing from there."""
    try:
        os.getcwd()
    except FileNotFoundError:
        os.chdir("/")


def _open_stderr() -> IO[bytes]:
    """Open a file without a name; in memory where the system can, so that a full disk is no error of what prints."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("autoprec-stderr"), "w+b")
    return tempfile.TemporaryFile()


def _open_pidfd(pid: int | None) -> int | None:
    if pid is None or not hasattr(os, "pidfd_open"):
        return None
    try:
        return os.pidfd_open(pid)
    except OSError:  # gone already, or a kernel without them
        return None


def _count_out_of_memory() -> int:
    """Return how many processes the system has killed for want of memory since it started; 0 where it does not say."""
    with contextlib.suppress(OSError, ValueError), open("/proc/vmstat", encoding="ascii") as file:
        for line in file:
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0
