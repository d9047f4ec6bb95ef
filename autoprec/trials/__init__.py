"""One short training, measured; and the worker process that runs it. The runner loads torch when it is first used."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from autoprec.trials.outcome import EndKind, NonFinite, Outcome, TrialSettings

if TYPE_CHECKING:
    from autoprec.trials.pool import WorkerPool
    from autoprec.trials.runner import run_trial
    from autoprec.trials.worker import InlineWorker, Worker

__all__ = [
    "EndKind",
    "InlineWorker",
    "NonFinite",
    "Outcome",
    "TrialSettings",
    "Worker",
    "WorkerPool",
    "run_trial",
]

_PLACES = {"run_trial": "runner", "Worker": "worker", "InlineWorker": "worker", "WorkerPool": "pool"}


def __getattr__(name: str) -> Any:
    if name in _PLACES:
        import importlib

        return getattr(importlib.import_module(f"{__name__}.{_PLACES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
