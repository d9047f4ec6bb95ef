"""A warm process that runs trials, watched from outside: what hangs or crashes in it is a result here.

with Worker(task.source) as worker:
    outcome = worker.run(policy, settings, timeout_seconds=600)
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import types
import weakref
from collections.abc import Iterator
from dataclasses import asdict
from multiprocessing import connection, reduction, util
from typing import IO, Any, Protocol, Self

from autoprec.errors import StudyError, TaskError
from autoprec.policy import Policy
from autoprec.tasks.protocol import Task
from autoprec.tasks.source import TaskSource
from autoprec.trials.failures import scrub, tail
from autoprec.trials.outcome import Outcome, TrialSettings
from autoprec.trials.process import serve

__all__ = ["TrialRunner", "Worker", "InlineWorker", "open_worker"]

MAX_STDERR = 4_000
STACK_SECONDS = 0.3
"""How long a hung process gets to write where it hangs, before it is killed."""
START_SECONDS = 120.0
"""How long a new process may take to build its task."""

assert util is not None  # its own exit function is registered before ours, and so runs after it


class TrialRunner(Protocol):
    """Runs trials of one task, in a process of its own or in this one."""

    def run(self, policy: Policy, settings: TrialSettings, *, timeout_seconds: float | None = None) -> Outcome: ...

    def close(self) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *exception: object) -> None: ...


def open_worker(task: Task) -> TrialRunner:
    """Return a worker process for a task that can travel to one, else a runner in this process."""
    if task.source is not None and "forkserver" in multiprocessing.get_all_start_methods():
        return Worker(task.source)
    return InlineWorker(task)


class InlineWorker:
    """Runs trials in this process: no time limit, and a crash takes everything along."""

    def __init__(self, task: Task) -> None:
        self._task = task

    def run(self, policy: Policy, settings: TrialSettings, *, timeout_seconds: float | None = None) -> Outcome:
        """Run one trial; `timeout_seconds` cannot be kept here and is not."""
        from autoprec.trials.runner import run_trial

        return run_trial(self._task, policy, settings)

    def close(self) -> None:
        """Nothing is held."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class Worker:
    """One warm process for one task. It is started when first needed, and again after a crash or a time limit.

    Messages are JSON. The process ends with this object, and with this process however that ends.

    Args:
        source: how the process builds the task.
        num_threads: of torch in the process; None takes as many as here.
    """

    def __init__(self, source: TaskSource, *, num_threads: int | None = None) -> None:
        self._source = source
        self._num_threads = num_threads
        self._process: _Process | None = None
        _OPEN.add(self)

    @property
    def pid(self) -> int | None:
        """The process's id, None where none is running."""
        return self._process.pid if self._process is not None and self._process.is_alive else None

    def run(self, policy: Policy, settings: TrialSettings, *, timeout_seconds: float | None = None) -> Outcome:
        """Run one trial in the process. A trial that hangs or kills the process is an outcome.

        Raises:
            TaskError: the process could not build the task; the message is the task's own.
            StudyError: no process could be started.
        """
        started = time.perf_counter()
        process = self._ready()
        process.mark_stderr()
        message = {"policy": policy.to_json(), "settings": settings.model_dump(mode="json")}
        try:
            reply = process.ask(message, timeout_seconds=timeout_seconds)
        except TimeoutError:
            outcome = _lost("timeout", f"no result within {timeout_seconds:g} s", self._stop(with_stack=True))
        except EOFError:
            reason = process.describe_exit()
            outcome = _lost("crashed", f"the process ended: {reason}", self._stop())
        except BaseException:
            self._stop()
            raise
        else:
            return Outcome.model_validate(reply["outcome"])
        return outcome.model_copy(update={"wall_seconds": time.perf_counter() - started})

    def start(self) -> None:
        """Start the process and build the task in it now, rather than at the first trial."""
        self._ready()

    def close(self) -> None:
        """End the process and all that it started."""
        self._stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _ready(self) -> _Process:
        if self._process is not None and self._process.is_alive:
            return self._process
        self._stop()
        self._process = process = _Process(self._source, self._threads())
        try:
            reply = process.receive(timeout_seconds=START_SECONDS)
        except TimeoutError:
            lines = self._stop(with_stack=True)
            raise StudyError(f"the task was not built within {START_SECONDS:g} s in a new process\n{lines}") from None
        except EOFError:
            reason = process.describe_exit()
            raise StudyError(f"a new process ended while it built the task: {reason}\n{self._stop()}") from None
        except BaseException:
            self._stop()
            raise
        if "error" in reply:
            self._stop()
            raise TaskError(reply["error"])
        return process

    def _threads(self) -> int:
        if self._num_threads is not None:
            return self._num_threads
        import torch

        return torch.get_num_threads()

    def _stop(self, *, with_stack: bool = False) -> str:
        """End the process; return the last lines that it wrote to stderr since the trial began."""
        process, self._process = self._process, None
        return "" if process is None else process.end(with_stack=with_stack)


class _Process:
    """The process itself: how it is started, talked to and ended."""

    def __init__(self, source: TaskSource, num_threads: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["autoprec.trials.preload"])
        self._stderr: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  (closed by `end`)
        flags = fcntl.fcntl(self._stderr, fcntl.F_GETFL)
        fcntl.fcntl(self._stderr, fcntl.F_SETFL, flags | os.O_APPEND)
        self._connection, theirs = context.Pipe()
        first = json.dumps({"source": asdict(source), "num_threads": num_threads, "path": sys.path})
        self._process = context.Process(
            target=_serve, args=(theirs, _Descriptor(self._stderr.fileno()), first), name="autoprec-trials", daemon=True
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


def _lost(kind: str, message: str, stderr: str) -> Outcome:
    return Outcome.model_validate({"kind": kind, "message": message, "stderr_tail": stderr})


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(OSError):
        os.kill(pid, number)


def _signal_group(pid: int) -> None:
    """Kill the process and its children: it leads a group of its own."""
    with contextlib.suppress(OSError):
        os.killpg(pid, signal.SIGKILL)
    _signal(pid, signal.SIGKILL)


_START_LOCK = threading.Lock()
_OPEN: weakref.WeakSet[Worker] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for worker in list(_OPEN):
        worker.close()
