"""Several warm worker processes for one task, for trials that measure no time on this device."""

from __future__ import annotations

import os
import queue
from collections.abc import Callable, Sequence
from typing import Any, Self

import torch

from autoprec.policy import Policy
from autoprec.tasks.code import code_digest
from autoprec.tasks.protocol import Task
from autoprec.trials.outcome import Outcome, TrialSettings
from autoprec.trials.worker import InlineWorker, TrialRunner, Worker, can_travel

__all__ = ["MAX_WORKERS", "WorkerPool", "default_num_workers"]

MAX_WORKERS = 4
"""More would ask for the memory of as many trainings at once."""


def default_num_workers(task: Task, device: str) -> int:
    """Return how many trials may run at once: one on a GPU, where time is measured, and in this process; else a core
    each, `MAX_WORKERS` at most. Two trials of one thread finish sooner than one after the other with two threads."""
    if torch.device(device).type != "cpu" or not can_travel(task):
        return 1
    return max(1, min(MAX_WORKERS, len(os.sched_getaffinity(0)), torch.get_num_threads()))


class WorkerPool:
    """Runs trials from several threads, each in the next idle process; torch's threads are shared out among them.

    Args:
        task: what is trained.
        num_workers: processes; with several `devices`, one for each of these.
        devices: where the trials run, whatever their settings say: no two at once on the same. Empty: as these say.
    """

    def __init__(self, task: Task, *, num_workers: int, devices: Sequence[str] = ()) -> None:
        if devices and len(devices) != num_workers:
            raise ValueError(f"{num_workers} workers for {len(devices)} devices; one for each is needed")
        threads = max(1, torch.get_num_threads() // num_workers)
        self.num_workers = num_workers
        self._workers: list[TrialRunner] = [_open(task, threads) for _ in range(num_workers)]
        self._idle: queue.SimpleQueue[tuple[TrialRunner, str | None]] = queue.SimpleQueue()
        for number, worker in enumerate(self._workers):
            self._idle.put((worker, devices[number] if devices else None))

    def run(self, policy: Policy, settings: TrialSettings, *, timeout_seconds: float | None = None) -> Outcome:
        """Run one trial in the next idle process, on its device; wait where there is none."""
        worker, device = idle = self._idle.get()
        if device is not None:
            settings = settings.model_copy(update={"device": device})
        try:
            return worker.run(policy, settings, timeout_seconds=timeout_seconds)
        finally:
            self._idle.put(idle)

    def call(self, name: str, arguments: dict[str, Any], *, timeout_seconds: float | None = None) -> Any:
        """Call a function with the task in the next idle process; see `Worker.call`."""
        worker, _ = idle = self._idle.get()
        try:
            return worker.call(name, arguments, timeout_seconds=timeout_seconds)
        finally:
            self._idle.put(idle)

    def stop(self) -> None:
        """End what runs now, from any thread: the trials that were running come back as crashed."""
        self._each(lambda worker: worker.stop())

    def close(self) -> None:
        """End the processes; nothing may be running."""
        self._each(lambda worker: worker.close())

    def _each(self, act: Callable[[TrialRunner], None]) -> None:
        for worker in self._workers:
            act(worker)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _open(task: Task, num_threads: int) -> TrialRunner:
    if can_travel(task):
        assert task.source is not None
        return Worker(task.source, num_threads=num_threads, code=code_digest(task))
    return InlineWorker(task)
