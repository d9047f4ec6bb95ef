"""One training of a task, of a length, under a policy, on a seed: what it gave, kept as a file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autoprec.policy import Policy
from autoprec.tasks import Task
from autoprec.trials import TrialSettings, run_trial
from horizon_parts.policies import FP32, policies_of

__all__ = ["REFERENCE", "Run", "load_runs", "plan_runs", "train"]

REFERENCE = "fp32"
FIRST_SEED = 1_000
LONGEST_WATCHED = 160
"""Longer runs stand for the training and not for a proof: their headroom is not looked at."""
NUM_WATCHED = 1
"""Seeds on which headroom is watched; the largest half value hardly varies, and watching doubles a step's time."""


@dataclass(frozen=True, slots=True)
class Run:
    task: str
    policy: str
    num_steps: int
    seed: int

    def path(self, folder: Path) -> Path:
        name = "".join(c if c.isalnum() else "-" for c in self.policy)
        return folder / f"{self.task}_{name}_{self.num_steps}_{self.seed}.json"


def plan_runs(task: str, num_steps: int, seeds: Sequence[int], *, only: Sequence[str] = ()) -> Iterator[Run]:
    """Yield every run of a task and a length, the seeds outermost so that pairs are complete early.

    Args:
        only: parts of the names of policies; FP32 and those whose name holds one of them are trained. Empty: all.
    """
    names = [name for name in policies_of(task) if not only or any(part in name for part in only)]
    yield from (Run(task, name, num_steps, seed) for seed in seeds for name in [REFERENCE, *names])


def train(run: Run, task: Task, policy: Policy) -> dict[str, Any]:
    """Train once, as a proof does: paired by the seed, the learning rate falling to zero. Return it as JSON values."""
    warmup = min(8, run.num_steps // 3)
    watches = run.seed < NUM_WATCHED and run.num_steps <= LONGEST_WATCHED
    settings = TrialSettings(
        seed=FIRST_SEED + run.seed,
        warmup_steps=warmup,
        measured_steps=run.num_steps - warmup,
        anneal=True,
        watch_headroom=watches,
        measure_start=policy == FP32,
    )
    outcome = run_trial(task, policy, settings)
    kept = outcome.model_dump(mode="json", exclude={"train_losses", "grad_norms", "scale_history"})
    return {"task": run.task, "policy": run.policy, "num_steps": run.num_steps, "seed": run.seed, "outcome": kept}


def load_runs(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
