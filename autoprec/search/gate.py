"""The regression gate: what a proof found beside what the policy's file promises, one kind with one kind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autoprec.policy import ArmEvidence, Number, Policy
from autoprec.search.arms import FP32
from autoprec.search.fingerprint import Identity, first_difference

__all__ = ["Comparison", "Gate", "compare_with_promise"]


@dataclass(frozen=True, slots=True)
class Comparison:
    """One promise: `what` was `promised` and is `found` now; `behind` where it is worse by more than `allowed` says."""

    what: str
    promised: Number
    found: Number
    allowed: str
    behind: bool


@dataclass(frozen=True, slots=True)
class Gate:
    """All promises that could be compared, and a note on each that could not."""

    comparisons: tuple[Comparison, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def holds(self) -> bool:
        return not any(comparison.behind for comparison in self.comparisons)


def compare_with_promise(
    policy: Policy,
    found: ArmEvidence,
    *,
    identity: Identity,
    target: str,
    target_is_here: bool,
    num_steps: int,
    tolerance: float,
) -> Gate:
    """Compare the numbers of a proof with those that the file recorded.

    Memory is compared as it is, throughput as its ratio to FP32's, which holds on another machine too; both may be
    worse by `tolerance`, relative. Accuracy may be lower by the recorded margin. Where a number has an interval, it is
    behind only where the whole interval is. Numbers of different kinds, of another task or of another device are not
    compared.
    """
    evidence, provenance = policy.evidence, policy.provenance
    promised = None if evidence is None else evidence.arms.get(evidence.arm)
    if evidence is None or promised is None:
        return Gate(notes=("the file records no numbers of this policy: nothing to compare",))
    other = first_difference(*_task_parts({} if provenance is None else provenance.settings, identity))
    if other is not None:
        return Gate(notes=(f"the file is of another task ({other}): nothing is compared",))
    device = None if provenance is None else provenance.device_name
    if target_is_here and device is not None and device != target:
        return Gate(notes=(f"the file's numbers are of {device}, these of {target}: nothing is compared",))
    pairs: list[tuple[str, Number | None, Number | None, float, bool]] = [
        ("peak memory", promised.peak_memory_bytes, found.peak_memory_bytes, tolerance, False),
        ("throughput over FP32", _throughput_ratio(promised, evidence.arms), found.throughput_ratio, tolerance, True),
    ]
    comparisons, notes = [], []
    for what, before, now, allowed, more_is_better in pairs:
        reason = _not_comparable(before, now)
        if reason is not None or before is None or now is None:
            notes.append(f"{what}: {reason}")
        else:
            behind = _is_behind(before, now, allowed, more_is_better)
            comparisons.append(Comparison(what, before, now, f"{allowed:.0%}", behind))
    proof = evidence.verification
    reason = _not_comparable(promised.accuracy, found.accuracy)
    if reason is None and (proof is None or proof.num_steps != num_steps):
        reason = "the file's runs had another number of steps"
    margin = None if proof is None else proof.margin
    reason = "the file records no margin" if reason is None and margin is None else reason
    if reason is not None or proof is None or margin is None or promised.accuracy is None or found.accuracy is None:
        notes.append(f"accuracy: {reason}")
    else:
        behind = _accuracy_behind(promised.accuracy, found.accuracy, margin, proof.metric_direction == "maximize")
        comparisons.append(Comparison("accuracy", promised.accuracy, found.accuracy, f"{margin:.3g}", behind))
    return Gate(tuple(comparisons), tuple(notes))


def _task_parts(recorded: Mapping[str, Any], identity: Identity) -> tuple[Identity, Identity]:
    """Return what both know of the task."""
    shared = [name for name in recorded if name.startswith("task.") and name in identity]
    return {name: recorded[name] for name in shared}, {name: identity[name] for name in shared}


def _throughput_ratio(promised: ArmEvidence, arms: Mapping[str, ArmEvidence]) -> Number | None:
    if promised.throughput_ratio is not None or FP32 not in arms:
        return promised.throughput_ratio
    own, fp32 = promised.throughput_samples_per_second, arms[FP32].throughput_samples_per_second
    if own is None or fp32 is None or own.kind != fp32.kind or fp32.value <= 0:
        return None
    return Number(value=own.value / fp32.value, kind=own.kind)


def _not_comparable(before: Number | None, now: Number | None) -> str | None:
    if before is None:
        return "the file records none"
    if now is None:
        return "this proof gave none"
    if before.kind != now.kind:
        return f"the file's is {before.kind}, this one {now.kind}: not compared"
    return None


def _accuracy_behind(before: Number, now: Number, margin: float, higher_is_better: bool) -> bool:
    """Whether the whole interval of the metric is worse than what was promised by more than the margin."""
    if higher_is_better:
        return (now.value if now.high is None else now.high) < before.value - margin
    return (now.value if now.low is None else now.low) > before.value + margin


def _is_behind(before: Number, now: Number, tolerance: float, more_is_better: bool) -> bool:
    if more_is_better:
        return (now.value if now.high is None else now.high) < before.value * (1 - tolerance)
    return (now.value if now.low is None else now.low) > before.value * (1 + tolerance)
