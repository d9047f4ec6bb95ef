"""What a job of an engine runs: `autoprec` with the user's own options, in a process that ends with the job."""

from __future__ import annotations

import collections
import contextlib
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from autoprec.trials.lifeline import as_parent

__all__ = ["Command", "Finished", "WorkerLostError"]

MAX_LOST = 3
"""Times that a command which a signal ended is started again in the same job."""
INTERRUPTED = 130
"""What `autoprec` ends with when it is told to end."""
LEAVING_SECONDS = 60.0
"""How long a job whose command was told to end waits for its own end. SLURM sends SIGTERM to all processes of a job
that is preempted or cancelled, and SIGKILL after its KillWait, 30 s where nobody has set it (slurm.conf(5))."""
NUM_LINES = 30
"""Last lines of stderr that come back."""
POLL_SECONDS = 0.1
STOP_SECONDS = 10.0
"""For which a command that is told to end, or killed, may take; what it started may hold its stderr as long."""


class WorkerLostError(RuntimeError):
    """A command that a signal has ended as often as it was started: the machine's fault rather than the user's."""


@dataclass(frozen=True)
class Finished:
    """How a command ended: its exit code, its stdout, the last lines of its stderr, and the files that it wrote."""

    exit_code: int
    stdout: str = ""
    stderr: str = ""
    files: dict[str, str] = field(default_factory=dict)


class Command:
    """Run `autoprec` with these arguments, wherever this object was unpickled.

    Its process gets SIGTERM when the one that runs this is gone, so that no device has a worker that nobody knows.

    Args:
        arguments: of the command line.
        folder: where it runs, if there is such a folder: paths in the arguments are relative to it.
        password: of the database, handed over in the environment and never on a command line.
        returns_files: let it write to a temporary folder, and bring what is there back.
    """

    def __init__(
        self, arguments: Sequence[str], *, folder: str, password: str | None = None, returns_files: bool = False
    ) -> None:
        self.arguments = list(arguments)
        self.folder = folder
        self.returns_files = returns_files
        self._password = password
        self._process: subprocess.Popen[str] | None = None
        self._is_stopped = False

    def __call__(self) -> Finished:
        """Run the command to its end, again where a signal has ended it.

        Where it was told to end, and not by this object, the job is about to be taken away: a result would say that
        it is done, and nobody would wait for the one that is queued in its place.

        Raises:
            WorkerLostError: one has ended it `MAX_LOST` times.
        """
        with tempfile.TemporaryDirectory(prefix="autoprec-") as folder:
            more = ["--output", folder] if self.returns_files else []
            for _ in range(MAX_LOST):
                finished = self._run([*self.arguments, *more])
                if finished.exit_code == INTERRUPTED and not self._is_stopped:
                    time.sleep(LEAVING_SECONDS)
                elif finished.exit_code >= 0 or self._is_stopped:
                    files = {path.name: path.read_text() for path in Path(folder).glob("*.json")}
                    return Finished(finished.exit_code, finished.stdout, finished.stderr, files)
        what = "an interrupt" if finished.exit_code == INTERRUPTED else f"signal {-finished.exit_code}"
        raise WorkerLostError(f"{what} ended the worker {MAX_LOST} times\n{finished.stderr}")

    def stop(self) -> None:
        """Let the running trial go, so that another worker runs it again; kill a command that does not end."""
        self._is_stopped = True
        if self._process is None:
            return
        for end in (self._process.terminate, self._process.kill):
            end()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_SECONDS)
                return

    def checkpoint(self) -> object:
        """Say what submitit is to run when it queues the job again: the same, since the study holds all there is."""
        from submitit.helpers import DelayedSubmission

        self.stop()
        return DelayedSubmission(self)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_process": None, "_is_stopped": False}

    def _run(self, arguments: Sequence[str]) -> Finished:
        environment = {**os.environ, **({} if self._password is None else {"PGPASSWORD": self._password})}
        folder = self.folder if Path(self.folder).is_dir() else None
        last: collections.deque[str] = collections.deque(maxlen=NUM_LINES)
        with tempfile.TemporaryFile("w+") as stdout:
            with as_parent():
                environment |= {name: os.environ[name] for name in os.environ if name.startswith("AUTOPREC_")}
                process = subprocess.Popen(
                    [sys.executable, "-m", "autoprec", *arguments],
                    env=environment,
                    cwd=folder,
                    stdin=subprocess.DEVNULL,
                    stdout=stdout,
                    stderr=subprocess.PIPE,
                    text=True,
                    errors="replace",
                )
            self._process = process
            reader = threading.Thread(target=_pass_on, args=(process.stderr, last), daemon=True)
            try:
                reader.start()
                while (code := process.poll()) is None:  # as long as the search: the engine's limit, or a user, ends it
                    time.sleep(POLL_SECONDS)  # wait() would keep the lock that stop() needs in a signal's handler
                reader.join(STOP_SECONDS)
            except BaseException:  # the engine cancels the job
                self.stop()
                raise
            stdout.seek(0)
            text = stdout.read()
        if not self.returns_files:
            print(text, end="", flush=True)
        return Finished(code, text, "".join(list(last)))


def _pass_on(stderr: IO[str], last: collections.deque[str]) -> None:
    """Write what comes to this process's stderr, and keep the last lines, until nobody holds the pipe."""
    with stderr:
        for line in stderr:
            last.append(line)
            sys.stderr.write(line)
            sys.stderr.flush()
