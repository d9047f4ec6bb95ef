"""A warm process that runs trials, watched from outside: what hangs or crashes in it is a result here.

with Worker(task.source) as worker:
    outcome = worker.run(policy, settings, timeout_seconds=600)
"""

from __future__ import annotations

import atexit
import multiprocessing
import time
import weakref
from multiprocessing import util
from typing import TYPE_CHECKING, Any, Protocol, Self

from autoprec.errors import StudyError, TaskError
from autoprec.policy import Policy
from autoprec.tasks.protocol import Task
from autoprec.tasks.source import TaskSource, load_function
from autoprec.trials.outcome import Outcome, TrialSettings

if TYPE_CHECKING:
    from autoprec.trials.child import WorkerProcess

__all__ = ["TrialRunner", "Worker", "InlineWorker", "can_travel"]

START_SECONDS = 300.0
"""How long a new process may take to build its task."""

assert util is not None  # its own exit function is registered before ours, and so runs after it


class TrialRunner(Protocol):
    """Runs trials of one task, in a process of its own or in this one."""

    def run(self, policy: Policy, settings: TrialSettings, *, timeout_seconds: float | None = None) -> Outcome: ...

    def call(self, name: str, arguments: dict[str, Any], *, timeout_seconds: float | None = None) -> Any: ...

    def stop(self) -> None: ...

    def close(self) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *exception: object) -> None: ...


def can_travel(task: Task) -> bool:
    """Whether another process can build the task, so that its trials need not run in this one."""
    return task.source is not None and "forkserver" in multiprocessing.get_all_start_methods()


class InlineWorker:
    """Runs trials in this process: no time limit, and a crash takes everything along."""

    def __init__(self, task: Task) -> None:
        self._task = task

    def run(self, policy: Policy, settings: TrialSettings, *, timeout_seconds: float | None = None) -> Outcome:
        """Run one trial; `timeout_seconds` cannot be kept here and is not."""
        from autoprec.trials.runner import run_trial

        return run_trial(self._task, policy, settings)

    def call(self, name: str, arguments: dict[str, Any], *, timeout_seconds: float | None = None) -> Any:
        """Call `package.module:function` with the task and JSON values, and return the JSON value that it returns.

        Raises:
            TaskError: the function raised; the message says what.
        """
        from autoprec.trials.failures import describe, format_traceback

        try:
            return load_function(name)(self._task, **arguments)
        except Exception as error:
            raise TaskError(f"{describe(error)}\n{format_traceback(error)}") from error

    def stop(self) -> None:
        """A trial in this process ends with the exception that interrupts it."""

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
        self._process: WorkerProcess | None = None
        self._is_stopped = False
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
        try:
            process = self._ready()
        except StudyError:
            if self._is_stopped:
                return _lost("crashed", "stopped before it began", "")
            raise
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

    def call(self, name: str, arguments: dict[str, Any], *, timeout_seconds: float | None = None) -> Any:
        """Call `package.module:function` in the process with the task and JSON values; return its JSON value.

        Raises:
            TaskError: the function raised, or the process was lost or took too long; the message says how.
        """
        process = self._ready()
        process.mark_stderr()
        try:
            reply = process.ask({"call": name, "arguments": arguments}, timeout_seconds=timeout_seconds)
        except TimeoutError:
            raise TaskError(f"no result within {timeout_seconds:g} s\n{self._stop(with_stack=True)}") from None
        except EOFError:
            reason = process.describe_exit()
            raise TaskError(f"the process ended: {reason}\n{self._stop()}") from None
        except BaseException:
            self._stop()
            raise
        if "error" in reply:
            raise TaskError(reply["error"])
        return reply["value"]

    def start(self) -> None:
        """Start the process and build the task in it now, rather than at the first trial."""
        self._ready()

    def stop(self) -> None:
        """Kill what runs now, also from another thread; no trial is run after it."""
        self._is_stopped = True
        process = self._process
        if process is not None:
            process.kill()

    def close(self) -> None:
        """End the process and all that it started."""
        self._stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _ready(self) -> WorkerProcess:
        from autoprec.trials.child import WorkerProcess  # needs POSIX, this module does not

        if self._process is not None and self._process.is_alive:
            return self._process
        self._stop()
        self._process = process = WorkerProcess(self._source, self._threads())
        if self._is_stopped:  # in another thread, while the process was started
            process.kill()
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


def _lost(kind: str, message: str, stderr: str) -> Outcome:
    return Outcome.model_validate({"kind": kind, "message": message, "stderr_tail": stderr})


_OPEN: weakref.WeakSet[Worker] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for worker in list(_OPEN):
        worker.close()
