"""What a memory budget allows each policy: the largest batch at the target's input size, and its throughput."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from optuna.study import Study

from autoprec.estimates import StepEstimate, largest_batch
from autoprec.policy import Number, Policy
from autoprec.search.front import LargestBatch
from autoprec.search.worth import Candidate
from autoprec.tasks.protocol import Task
from autoprec.trials.isolation import isolated
from autoprec.trials.outcome import TrialSettings
from autoprec.trials.target import TargetEstimator

__all__ = ["fit_batch", "largest_batches"]

BUDGET_PREFIX = "autoprec:budget:"

Estimate = Callable[[Policy, int | None], StepEstimate]
"""A policy and a batch size (None: the target's) -> one step."""


def largest_batches(
    study: Study, task: Task, trial: TrialSettings, candidates: Iterable[Candidate], *, budget_bytes: float
) -> dict[str, LargestBatch]:
    """Return name -> what fits, for each candidate that ran; kept in the study, so that each is estimated once."""
    opened: list[TargetEstimator] = []

    def estimate(policy: Policy, batch_size: int | None) -> StepEstimate:
        if not opened:
            opened.append(TargetEstimator(task, trial))
        return opened[0](policy, batch_size=batch_size)

    found: dict[str, LargestBatch] = {}
    for candidate in candidates:
        if not candidate.outcome.is_ok:
            continue
        attribute = f"{BUDGET_PREFIX}{budget_bytes:.0f}:{candidate.key}"
        known: Any = study.user_attrs.get(attribute)
        if known is None:
            with isolated():
                fitted = fit_batch(candidate, estimate, budget_bytes=budget_bytes, steps=task.accumulation_steps)
            if fitted is None:
                continue
            known = fitted.model_dump(mode="json")
            study.set_user_attr(attribute, known)
        found[candidate.name] = LargestBatch.model_validate(known)
    return found


def fit_batch(candidate: Candidate, estimate: Estimate, *, budget_bytes: float, steps: int = 1) -> LargestBatch | None:
    """Find the largest (micro-)batch of one policy; None where its step cannot be computed without running it.

    Where memory and throughput of the target shape were measured, the estimates are scaled to meet them there.
    """
    at_target = estimate(candidate.policy, None)
    if at_target.peak_memory_bytes.kind != "computed":
        return None
    memory = _scale(candidate.outcome.peak_memory_bytes, at_target.peak_memory_bytes)
    speed = _scale(candidate.outcome.throughput_samples_per_second, at_target.throughput_samples_per_second)

    def peak_bytes(batch_size: int) -> float:
        return estimate(candidate.policy, batch_size).peak_memory_bytes.value * memory

    size = largest_batch(peak_bytes, budget_bytes, start=at_target.num_samples // steps)
    if size == 0:
        return LargestBatch(batch_size=0)
    step = estimate(candidate.policy, size)
    return LargestBatch(
        batch_size=size,
        peak_memory_bytes=Number(
            value=step.peak_memory_bytes.value * memory, kind="computed" if memory == 1.0 else "predicted"
        ),
        throughput_samples_per_second=Number(value=step.throughput_samples_per_second.value * speed, kind="predicted"),
    )


def _scale(found: Number | None, estimated: Number) -> float:
    return 1.0 if found is None else found.value / estimated.value
