"""The inside of a worker process: it builds the task once, then answers trials until its parent is gone."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import json
import multiprocessing
import os
import secrets
import select
import signal
import sys
import time
from multiprocessing import connection, process
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autoprec.errors import AutoprecError
from autoprec.trials.failures import describe, format_traceback
from autoprec.trials.lifeline import end_with_parent

if TYPE_CHECKING:
    from autoprec.trials.health import Health

__all__ = ["guard_group", "serve"]

WATCH_SECONDS = 1.0
MARK = "AUTOPREC_WORKER"
"""Environment variable of all that a worker process starts."""
MAX_SCANS = 20
_LEADER = 0
"""This process, in it and in all that it forks."""


def serve(parent: connection.Connection, stderr: int, first: dict[str, Any]) -> None:
    """Run as the process: `first` says what to build; each later message is a trial or a call, with a number."""
    global _LEADER
    _LEADER = os.getpid()
    _detach_from_terminal()
    guard_group(first["search_pid"], os.getpid())
    os.dup2(stderr, 1)  # what the task prints must not end in the search's own output
    os.dup2(stderr, 2)
    os.close(stderr)
    faulthandler.enable(file=2, all_threads=False)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=False)
    sys.path[:] = first["path"]
    multiprocessing.set_start_method(None, force=True)  # this process's own, forkserver, is not what the task expects
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        task = _build(parent, first)
        if task is None:
            return
        from autoprec.trials.health import Health

        health = Health()
        while True:
            _answer(parent, task, json.loads(parent.recv_bytes()), health)


def _build(parent: connection.Connection, first: dict[str, Any]) -> Any:
    import torch

    from autoprec.tasks.code import code_digest
    from autoprec.tasks.source import TaskSource

    torch.set_num_threads(first["num_threads"])
    try:
        task = TaskSource(**first["source"]).build()
    except AutoprecError as error:
        own = error.__cause__  # the user's code raised: its traceback would be lost on the way
        traceback = "" if not isinstance(own, Exception) else f"\n{format_traceback(own)}"
        _send(parent, {"error": f"{error}{traceback}"})
        return None
    except Exception as error:
        _send(parent, {"error": f"{describe(error)}\n{format_traceback(error)}"})
        return None
    gc.collect()
    gc.freeze()
    _send(parent, {"code": code_digest(task)})
    return task


def _answer(parent: connection.Connection, task: Any, message: dict[str, Any], health: Health) -> None:
    if "call" in message:
        _send(parent, _called(task, message), message)
        return
    from autoprec.policy import Policy
    from autoprec.trials.outcome import TrialSettings
    from autoprec.trials.runner import run_trial

    settings = TrialSettings.model_validate(message["settings"])
    outcome = run_trial(task, Policy.from_json(message["policy"]), settings)
    _send(parent, {"outcome": outcome.model_dump(mode="json"), "spent": health.look(settings.device)}, message)


def _called(task: Any, message: dict[str, Any]) -> dict[str, Any]:
    """Call the named function with the task; an exception is an answer."""
    from autoprec.tasks.loading import load_function

    try:
        return {"value": load_function(message["call"])(task, **message["arguments"])}
    except Exception as error:
        return {"error": f"{describe(error)}\n{format_traceback(error)}"}


def _send(parent: connection.Connection, answer: dict[str, Any], message: dict[str, Any] | None = None) -> None:
    """Answer a message under its number; a process that the task has forked, and that came as far as this, ends."""
    if os.getpid() != _LEADER:
        os._exit(0)
    number = {} if message is None else {"number": message["number"]}
    parent.send_bytes(json.dumps(answer | number, allow_nan=False).encode())


def _detach_from_terminal() -> None:
    """Lead a process group of its own: Ctrl-C is the parent's to handle, and children end with one signal."""
    with contextlib.suppress(OSError):
        os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    process.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # data loaders may start workers


def guard_group(search_pid: int, leader: int) -> None:
    """Fork a process that ends the process group of `leader` (this process or its parent) when the search or it ends.

    The fork server, a worker's parent, outlives the search by a moment, and a trial that keeps the interpreter's
    lock runs no thread of ours: so the guard is a process. Where even that is gone, the kernel ends this one.
    """
    end_with_parent()
    mark = os.environ[MARK] = f"{leader}-{secrets.token_hex(8)}"
    between = os.fork()
    if between == 0:
        try:
            os.setsid()  # out of the group that it ends
            if os.fork() == 0:
                os.closerange(0, os.sysconf("SC_OPEN_MAX"))  # the search sees this worker's end by a closed pipe
                _wait_for_any(search_pid, leader)
                try:
                    os.killpg(leader, signal.SIGKILL)
                finally:
                    _end_marked(mark)
        finally:
            os._exit(0)
    os.waitpid(between, 0)


def _end_marked(mark: str) -> None:
    """Kill the programs that were started with this mark in their environment, in whatever session; Linux alone tells.

    A process that was forked without a program of its own carries the environment of the fork server: it is not found.
    """
    wanted = f"{MARK}={mark}".encode()
    for _ in range(MAX_SCANS):  # one may start another meanwhile
        found = False
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if wanted in path.read_bytes().split(b"\0"):
                    os.kill(int(path.parent.name), signal.SIGKILL)
                    found = True
        if not found:
            return
        time.sleep(0.05)


def _wait_for_any(*pids: int) -> None:
    """Return when one of the processes is gone."""
    try:
        if hasattr(os, "pidfd_open"):
            select.select([os.pidfd_open(pid) for pid in pids], [], [])
            return
        while True:
            for pid in pids:
                os.kill(pid, 0)
            time.sleep(WATCH_SECONDS)
    except ProcessLookupError:
        return
