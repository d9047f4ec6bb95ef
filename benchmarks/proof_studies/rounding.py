"""Planted truths: one unit that BF16 harms by its 8 bits, in a random place, on a GPU with BF16 units."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from autoprec.policy import Policy, load_policy
from autoprec.profiling.profile import Profile
from autoprec.profiling.run import take_profile
from autoprec.tasks import Task
from autoprec.trials import Outcome, TrialSettings, run_trial
from proof_studies.networks import WIDTH, Block, digits_task
from proof_studies.running import Finding, Part, counts, precision_of, search

__all__ = ["ROUNDING"]

GPU = "a100-80"
NUM_BLOCKS = 3
NUM_TERMS = 100_000
LEVEL = 3_000.0
POSITION = 512.0


class LargeNorm(nn.Linear):
    """Normalises large, nearly equal values: BF16 has steps of 16 between 2,048 and 4,096."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(super().forward(x) + LEVEL, (self.out_features,))


class LongSum(nn.Linear):
    """Sums 100,000 terms near 1 for each output and takes the level off: what differs is .1 % of a term."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        terms = 1.0 + 1e-3 * super().forward(x)
        total = terms.unsqueeze(-1).expand(*terms.shape, NUM_TERMS).sum(-1)
        return (total - NUM_TERMS) / (1e-3 * NUM_TERMS)


class FarPosition(nn.Linear):
    """Embeds a position past 512 by a sine: BF16 knows every fourth one there."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(super().forward(x) + POSITION + math.pi / 3)


HARMS: dict[str, Callable[[int, int], nn.Module]] = {
    "large norm": LargeNorm,
    "long sum": LongSum,
    "far position": FarPosition,
}
BOTTLENECK = 6
"""Outputs of the unit that sums, so that a step takes milliseconds."""


class RoundedBlock(Block):
    """A block whose layer is one that BF16 harms."""

    def __init__(self, width_in: int, kind: str) -> None:
        super().__init__(width_in, WIDTH, "plain")
        width = BOTTLENECK if kind == "long sum" else WIDTH
        self.unit = HARMS[kind](width_in, width)
        self.norm = nn.LayerNorm(width)
        self.wide = nn.Linear(width, WIDTH)


def _task(number: int) -> tuple[Task, str]:
    """Return a task with one culprit in a random place, and the name of its unit."""
    kind = list(HARMS)[number % len(HARMS)]
    place = int(np.random.default_rng(number).integers(NUM_BLOCKS))
    plain = digits_task(f"{kind}-{place}", ["plain"] * NUM_BLOCKS, lr=0.03)

    def build() -> nn.Module:
        network = plain.model()
        network.blocks[place] = RoundedBlock(64 if place == 0 else WIDTH, kind)  # type: ignore[index, operator]
        return network

    return replace(plain, model=build), f"blocks.{place}.unit"


@dataclass(frozen=True, slots=True)
class Profiled:
    """Trials in this process, and the profile: what BF16 rounds is seen there before any trial."""

    task: Task

    def __call__(self, policy: Policy, settings: TrialSettings) -> Outcome:
        return run_trial(self.task, policy, settings)

    def profile(self, units: Sequence[str], settings: TrialSettings, study_name: str) -> Profile:
        return take_profile(self.task, units, settings, study_name=study_name)


def _study(number: int, folder: Path) -> Finding:
    task, unit = _task(number)
    trial = TrialSettings(seed=number, device="cpu", gpu=GPU)
    result = search(task, folder, seed=number, trial=trial, measure=Profiled(task))
    policy = load_policy(folder / "policy.json")
    model = task.model()
    sampled = [record.policy for record in result.records if not record.arm]
    return {
        "task": task.name,
        "choice": result.choice.kind,
        "name": result.choice.name,
        "dtype": sorted(policy.low_precisions),
        "has_scaler": policy.needs_grad_scaler,
        "culprit": precision_of(model, policy, unit),
        "sampled": len(sampled),
        "sampled_in_half": sum(precision_of(model, own, unit) != "fp32" for own in sampled),
    }


def _summary(findings: Sequence[Finding]) -> list[str]:
    found = [finding for finding in findings if finding["choice"] == "policy"]
    kept = sum(finding["culprit"] == "fp32" for finding in findings)
    return [
        f"rounding: the culprit is in FP32 in {kept} of {len(findings)} recommendations, in "
        f"{sum(finding['culprit'] == 'fp32' for finding in found)} of {len(found)} found policies "
        f"({counts([finding['choice'] for finding in findings])})",
        f"rounding: of {sum(f['sampled'] for f in findings)} sampled policies "
        f"{sum(f['sampled_in_half'] for f in findings)} had it in half; "
        f"{sum(f['has_scaler'] for f in findings)} recommendations need a grad scaler",
    ]


ROUNDING = Part(20, _study, _summary)
