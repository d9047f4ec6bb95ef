"""Planted truths: one unit that FP16 harms, in a random place. What is recommended is then trained ten times longer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from autoprec.estimates import StepSettings, real_peak
from autoprec.policy import Policy, load_policy
from autoprec.search.proof import Proof
from autoprec.tasks import Task
from autoprec.trials import run_trial
from autoprec.trials.target import estimate_figures
from proof_studies.networks import digits_task
from proof_studies.running import FP32, Finding, Part, counts, precision_of, search, trial_settings

__all__ = ["PLANTED"]

KINDS = ("overflow", "vanish", "poison")
NUM_BLOCKS = 3
MAX_DROP = 0.05
"""Accuracy that a recommended policy may have lost in the end; the proof itself allows a tenth of what FP32 gained."""
LONG_FACTOR = 10
LONG_SEED = 50_000
"""Distance to seeds that neither trials nor proof used."""
POINTS = 3.0
"""How far a claimed ratio may lie from a fresh one, in points of FP32's."""


def _study(number: int, folder: Path) -> Finding:
    task, unit = _task(number)
    result = search(task, folder, seed=number, prefer="smallest")  # on a GPU such small steps are bound by launches
    policy = load_policy(folder / "policy.json")
    is_low = bool(policy.low_precisions)
    return {
        "task": task.name,
        "choice": result.choice.kind,
        "name": result.choice.name,
        "margin": MAX_DROP,
        "drop": _long_drop(task, policy, seed=number) if is_low else 0.0,
        "culprit": precision_of(task.model(), policy, unit),
        "points": _points(policy, number) if is_low else None,
    }


def _task(number: int) -> tuple[Task, str]:
    """Return a task with one culprit in a random place, and the name of its unit."""
    kind, place = KINDS[number % len(KINDS)], int(np.random.default_rng(number).integers(NUM_BLOCKS))
    kinds = ["plain"] * NUM_BLOCKS
    kinds[place] = kind
    return digits_task(f"{kind}-{place}", kinds), f"blocks.{place}.unit"


def _long_drop(task: Task, policy: Policy, *, seed: int) -> float:
    """Return FP32's accuracy minus the policy's after ten times the steps of the proof, on an unused seed."""
    plan = replace(Proof(), num_steps=Proof().num_steps * LONG_FACTOR, first_seed=LONG_SEED)
    settings = plan.settings(trial_settings(seed), 0).model_copy(update={"watch_headroom": False})
    fp32, own = (run_trial(task, p, settings).accuracy for p in (FP32, policy))
    assert fp32 is not None
    return fp32.value - (0.0 if own is None else own.value)  # a run that diverged has lost all


def _points(policy: Policy, number: int) -> dict[str, float]:
    """Return how far the ratios that the file claims lie from fresh ones, in points.

    Memory is claimed as computed: it is measured here as the peak of the tensors of a real step, FP16 emulated, at the
    target shape, and computed again. Throughput is claimed as predicted for a GPU that is not here: predicted again.
    """
    assert policy.evidence is not None
    claimed = policy.evidence.arms[policy.evidence.arm]
    assert claimed.memory_ratio is not None
    assert claimed.throughput_ratio is not None
    task, settings = _task(number)[0], trial_settings(number + 1)
    own, fp32 = (estimate_figures(task, p, settings) for p in (policy, FP32))
    computed = own.peak_memory_bytes.value / fp32.peak_memory_bytes.value
    predicted = own.throughput_samples_per_second.value / fp32.throughput_samples_per_second.value
    measured = _real_peak(task, policy) / _real_peak(task, FP32)
    memory, throughput = claimed.memory_ratio.value, claimed.throughput_ratio.value
    return {
        "memory, measured": 100 * abs(measured - memory),
        "memory, computed": 100 * abs(computed - memory),
        "throughput, predicted": 100 * abs(predicted - throughput),
    }


def _real_peak(task: Task, policy: Policy) -> float:
    assert task.target is not None
    torch.manual_seed(0)
    settings = StepSettings(
        policy=policy, optimizer=torch.optim.SGD, optimizer_settings={"lr": 0.1, "momentum": 0.9}, foreach=True
    )
    return float(real_peak(task.model(), task.target.make_batch(), task.loss, settings=settings).peak_bytes)


def _summary(findings: Sequence[Finding]) -> list[str]:
    found = [finding for finding in findings if finding["choice"] == "policy"]
    safe = sum(finding["drop"] <= finding["margin"] for finding in findings)
    named = sum(finding["culprit"] == "fp32" for finding in found)
    worst = max((finding["drop"] for finding in findings), default=0.0)
    points = [finding["points"] for finding in findings if finding["points"] is not None]
    largest = {what: max(p[what] for p in points) for what in (points[0] if points else ())}
    close = sum(max(p.values()) <= POINTS for p in points)
    return [
        f"planted: {safe} of {len(findings)} recommendations are within the margin after {LONG_FACTOR} times the "
        f"steps; the largest loss of accuracy is {worst:+.4f}",
        f"planted: the culprit is in FP32 in {named} of {len(found)} found policies "
        f"({counts([finding['choice'] for finding in findings])})",
        f"ratios: {close} of {len(points)} recommendations of a low precision within {POINTS:g} points; largest: "
        + ", ".join(f"{value:.2f} of {what}" for what, value in largest.items()),
    ]


PLANTED = Part(50, _study, _summary)
