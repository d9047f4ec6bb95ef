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
from autoprec.tasks.loading import load_function
from autoprec.tasks.protocol import Task
from autoprec.tasks.source import TaskSource
from autoprec.trials.outcome import EndKind, Outcome, TrialSettings

if TYPE_CHECKING:
    from autoprec.trials.child import WorkerProcess
    from autoprec.trials.group import Group

__all__ = ["TrialRunner", "Worker", "InlineWorker", "can_travel"]

START_SECONDS = 300.0
"""How long a new process may take to build its task."""
MAX_ASKED, MAX_BUILT = 4, 5
"""Processes that somebody else may end in the middle of one trial, and while they build the task for it."""

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
    """One warm process for one task.

    It is started when first needed, and again after a crash, a time limit or a trial that left it unfit (its device
    does not answer, memory did not come back). What was lost because somebody else ended the process (a signal from
    outside, the fork server's end) is run again, a few times.

    Messages are JSON. The process ends with this object, and with this process however that ends.

    Args:
        source: how the process builds the task.
        num_threads: of torch in the process; None takes as many as here.
        code: the digest that the code of the task must have there (`code_digest`); None takes any.
    """

    def __init__(self, source: TaskSource, *, num_threads: int | None = None, code: str | None = None) -> None:
        self._source = source
        self._code = code
        self._num_threads = num_threads
        self._process: WorkerProcess | None = None
        self._group: Group | None = None
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
            StudyError: no process could be started, or the task's code is another one there.
        """
        started = time.perf_counter()
        if settings.num_processes > 1:
            return self._run_group(policy, settings, timeout_seconds=timeout_seconds)
        message = {"policy": policy.to_json(), "settings": settings.model_dump(mode="json")}
        try:
            reply = self._exchange(message, timeout_seconds=timeout_seconds)
        except _LostError as lost:
            if lost.while_building and not self._is_stopped:
                raise StudyError(lost.text) from None
            seconds = time.perf_counter() - started
            return Outcome(kind=lost.kind, message=lost.reason, stderr_tail=lost.stderr, wall_seconds=seconds)
        outcome = Outcome.model_validate(reply["outcome"])
        if reply["spent"]:
            self._stop()
            note = f"the process was replaced after this trial: {reply['spent']}"
            outcome = outcome.model_copy(update={"notes": [*outcome.notes, note]})
        return outcome

    def _run_group(self, policy: Policy, settings: TrialSettings, *, timeout_seconds: float | None) -> Outcome:
        from autoprec.trials.group import Group  # needs POSIX, this module does not

        self._stop()  # it would hold memory of the first GPU
        self._group = group = Group(self._source, num_threads=max(1, self._threads() // settings.num_processes))
        if self._is_stopped:
            return Outcome(kind="crashed", message="stopped before it began")
        return group.run(policy, settings, timeout_seconds=timeout_seconds)

    def call(self, name: str, arguments: dict[str, Any], *, timeout_seconds: float | None = None) -> Any:
        """Call `package.module:function` in the process with the task and JSON values; return its JSON value.

        Raises:
            TaskError: the function raised, or the process was lost or took too long; the message says how.
        """
        try:
            reply = self._exchange({"call": name, "arguments": arguments}, timeout_seconds=timeout_seconds)
        except _LostError as lost:
            raise TaskError(lost.text) from None
        if "error" in reply:
            raise TaskError(reply["error"])
        return reply["value"]

    def start(self) -> None:
        """Start the process and build the task in it now, rather than at the first trial.

        Raises:
            TaskError, StudyError: as `run`.
        """
        try:
            self._ready()
        except _LostError as lost:
            raise StudyError(lost.text) from None

    def stop(self) -> None:
        """Kill what runs now, also from another thread; no trial is run after it."""
        self._is_stopped = True
        process = self._process
        if process is not None:
            process.kill()
        if self._group is not None:
            self._group.kill()

    def close(self) -> None:
        """End the process and all that it started."""
        self._stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _exchange(self, message: dict[str, Any], *, timeout_seconds: float | None) -> dict[str, Any]:
        """Send a message and return the answer; again where somebody else ended the process meanwhile, a few times.

        So too where a process is ended before it has the message.

        Raises:
            _LostError: no answer; the process is gone.
        """
        num_asked = num_built = 0
        while True:
            try:
                return self._ask(message, timeout_seconds=timeout_seconds)
            except _LostError as lost:
                num_asked, num_built = num_asked + (not lost.while_building), num_built + lost.while_building
                is_last = num_asked == MAX_ASKED or num_built == MAX_BUILT
                if is_last or not lost.from_outside or self._is_stopped:
                    raise

    def _ask(self, message: dict[str, Any], *, timeout_seconds: float | None) -> dict[str, Any]:
        process = self._ready()
        process.mark_stderr()
        try:
            return process.ask(message, timeout_seconds=timeout_seconds)
        except TimeoutError:
            raise _LostError(
                "timeout", f"no result within {timeout_seconds:g} s", self._stop(with_stack=True)
            ) from None
        except EOFError:
            raise self._lost(process, "the process ended") from None
        except BaseException:
            self._stop()
            raise

    def _ready(self) -> WorkerProcess:
        from autoprec.trials.child import WorkerProcess  # needs POSIX, this module does not

        if self._process is not None and self._process.is_alive:
            return self._process
        self._stop()
        if self._is_stopped:
            raise _LostError("crashed", "stopped before it began", while_building=True)
        self._process = process = WorkerProcess(self._source, self._threads())
        if self._is_stopped:  # in another thread, while the process was started
            process.kill()
        try:
            reply = process.receive(timeout_seconds=START_SECONDS)
        except TimeoutError:
            reason = f"the task was not built within {START_SECONDS:g} s in a new process"
            raise _LostError("timeout", reason, self._stop(with_stack=True), while_building=True) from None
        except EOFError:
            raise self._lost(process, "a new process ended while it built the task", while_building=True) from None
        except BaseException:
            self._stop()
            raise
        if "error" in reply:
            self._stop()
            raise TaskError(reply["error"])
        if self._code is not None and reply["code"] != self._code:
            self._stop()
            raise StudyError(
                "the code of the task has changed while its trials ran; the finished ones are of the code from before: "
                "give the command again for a study of the new one"
            )
        return process

    def _lost(self, process: WorkerProcess, what: str, *, while_building: bool = False) -> _LostError:
        """Let go of a process that has ended, and say how it did."""
        reason = process.describe_exit()
        kind: EndKind
        if process.was_ended_for_memory:
            kind, reason = "out_of_memory", f"{reason}: the system was out of memory"
        else:
            kind = "crashed"
        from_outside = process.was_ended_from_outside and kind == "crashed"
        stderr = self._stop()
        return _LostError(kind, f"{what}: {reason}", stderr, from_outside=from_outside, while_building=while_building)

    def _threads(self) -> int:
        if self._num_threads is not None:
            return self._num_threads
        import torch

        return torch.get_num_threads()

    def _stop(self, *, with_stack: bool = False) -> str:
        """End the process; return the last lines that it wrote to stderr since the trial began."""
        process, self._process = self._process, None
        return "" if process is None else process.end(with_stack=with_stack)


class _LostError(Exception):
    """A process that is gone without an answer."""

    def __init__(
        self,
        kind: EndKind,
        reason: str,
        stderr: str = "",
        *,
        from_outside: bool = False,
        while_building: bool = False,
    ) -> None:
        super().__init__(reason)
        self.kind: EndKind = kind
        self.reason, self.stderr = reason, stderr
        self.from_outside, self.while_building = from_outside, while_building

    @property
    def text(self) -> str:
        return f"{self.reason}\n{self.stderr}".rstrip()


_OPEN: weakref.WeakSet[Worker] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for worker in list(_OPEN):
        worker.close()
