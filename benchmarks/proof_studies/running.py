"""What the studies share: a search in this process, and where one unit ended up."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from autoprec.policy import Policy, resolve_precisions
from autoprec.search.lookahead import Measure
from autoprec.search.pipeline import SearchResult, run_search
from autoprec.search.plan import SearchSettings, prepare_search
from autoprec.search.worth import Worth
from autoprec.tasks import Task
from autoprec.trials import TrialSettings, run_trial

__all__ = ["FP32", "GPU", "Finding", "Part", "counts", "inline", "precision_of", "search", "trial_settings"]

FP32 = Policy(default="fp32")
GPU = "v100"
"""Without BF16 units, so that plain autocast in BF16 is no way out."""

EVERY_GAIN = Worth(min_gain=0.01, min_gain_with_scaler=0.01, min_memory_share=0.0)
"""These networks are so small that no saving would matter on a GPU; here every one is to tempt the search."""

Finding = dict[str, Any]
"""What one study found; crosses processes as JSON."""


@dataclass(frozen=True, slots=True)
class Part:
    """One claim: how many studies it needs, what one does in an empty folder, and the lines that sum them up."""

    num_studies: int
    study: Callable[[int, Path], Finding]
    summary: Callable[[Sequence[Finding]], list[str]]


def trial_settings(seed: int) -> TrialSettings:
    return TrialSettings(seed=seed, device="cpu", gpu=GPU)


def inline(task: Task) -> Measure:
    """Run trials in this process: a worker's start would cost more than the trial."""
    return lambda policy, settings: run_trial(task, policy, settings)


def search(
    task: Task,
    folder: Path,
    *,
    seed: int,
    measure: Measure | None = None,
    trial: TrialSettings | None = None,
    **settings: Any,
) -> SearchResult:
    shutil.rmtree(folder, ignore_errors=True)
    chosen = {"n_trials": 10, "output": folder, "worth": EVERY_GAIN, "compare": "fp32", **settings}
    plan = prepare_search(task, trial=trial or trial_settings(seed), settings=SearchSettings(**chosen))
    return run_search(plan, measure or inline(task))


def precision_of(model: nn.Module, policy: Policy, name: str) -> str:
    parents = {n: (n.rpartition(".")[0] if n else None) for n, _ in model.named_modules()}
    return resolve_precisions(policy, parents)[0][name]


def counts(values: Sequence[str]) -> str:
    return ", ".join(f"{values.count(value)} {value}" for value in sorted(set(values)))
