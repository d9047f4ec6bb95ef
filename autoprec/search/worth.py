"""When one policy is worth more than another: the common sense behind every pick, as a comparison of two.

Comes in: policies with their memory and throughput over FP32's. Goes out: which is worth its complexity, which is
beaten, and the best by a preference. Verdicts of a proof are no matter here: a caller gives the arms that may be used.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from autoprec.errors import UsageError, did_you_mean
from autoprec.estimates import RATIO_ERROR, throughput_ratio_interval
from autoprec.policy import Number, Policy
from autoprec.search.arms import AUTOCAST_BF16, FP32, is_stock
from autoprec.search.ratios import NO_RATIOS, Ratios, outcome_ratios
from autoprec.trials.outcome import Outcome

__all__ = ["Candidate", "Prefer", "PREFERENCES", "Worth", "as_preference", "best", "in_order", "score"]

Prefer = Literal["balanced", "fastest", "smallest"]
PREFERENCES: tuple[Prefer, ...] = get_args(Prefer)
SAME = 1e-3
"""Numbers nearer than this share are one number: then the arm that skips fewer steps, then the simpler one."""


def as_preference(name: str) -> Prefer:
    """Return the preference of that name.

    Raises:
        UsageError: there is none.
    """
    for prefer in PREFERENCES:
        if prefer == name:
            return prefer
    raise UsageError(f"prefer {name!r}; allowed: {', '.join(PREFERENCES)}{did_you_mean(name, PREFERENCES)}")


@dataclass(frozen=True, slots=True)
class Candidate:
    """An arm with the outcome that gives its memory and throughput.

    `paired` holds its ratios to FP32 over the pairs of a proof; where it has none, those of the outcomes stand. `trial`
    is the label of the trial that it is a shorter form of.
    """

    name: str
    policy: Policy
    key: str
    outcome: Outcome
    paired: Ratios = NO_RATIOS
    trial: str = ""

    @property
    def is_found(self) -> bool:
        return not is_stock(self.name)

    @property
    def simplicity(self) -> int:
        """From the simplest: FP32; stock BF16 autocast; stock FP16, which needs a grad scaler; then found policies."""
        if not self.is_found:
            return 0 if self.name == FP32 else 1 if self.name == AUTOCAST_BF16 else 2
        return 4 if self.policy.needs_grad_scaler else 3

    def ratios(self, reference: Candidate) -> Ratios:
        """Return memory and throughput over the reference's, those measured in pairs first."""
        single = outcome_ratios(self.outcome, reference.outcome)
        return Ratios(self.paired.memory or single.memory, self.paired.throughput or single.throughput)

    def fits(self, memory_budget_bytes: float | None) -> bool:
        """Whether the peak memory lies within the budget; a memory that is not known fits none."""
        if memory_budget_bytes is None:
            return True
        memory = self.outcome.peak_memory_bytes
        return memory is not None and memory.value <= memory_budget_bytes


@dataclass(frozen=True, slots=True)
class Worth:
    """What a gain has to be. No part of a study's identity: choosing again runs nothing.

    Attributes:
        min_gain: share of memory or time that a found policy must gain over a stock one to be worth its complexity.
        min_gain_with_scaler: the same for a policy that needs a grad scaler, over one that needs none.
        min_stock_gain: the same for stock autocast over FP32, and between equally complex policies.
        min_memory_share: of the target's memory; a saving below it matters to nobody, and pays for no slowdown.
        capacity_bytes: the target's memory; None where it is unknown, so that every saving counts.
        memory_budget_bytes: what the wanted batch has to fit into, where that is less.
        gpu: the target of predicted ratios, by which their interval is known; "" takes the widest error.
        present: name of the arm that the user runs today. Nobody changes a running training for nothing: it is left
            for FP32 only where it is slower or larger, and not for want of a gain over it.
    """

    min_gain: float = 0.03
    min_gain_with_scaler: float = 0.05
    min_stock_gain: float = 0.01
    min_memory_share: float = 0.01
    capacity_bytes: float | None = None
    memory_budget_bytes: float | None = None
    gpu: str = ""
    present: str = ""

    def __post_init__(self) -> None:
        for name in ("min_gain", "min_gain_with_scaler"):
            if not 0 <= getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}; a share from 0, below 1, is needed")

    def needed(self, candidate: Candidate, other: Candidate) -> float:
        """Return the share of memory or time that a candidate must gain over a simpler one."""
        if candidate.policy.needs_grad_scaler and not other.policy.needs_grad_scaler:
            return self.min_gain_with_scaler
        return self.min_gain if candidate.is_found and not other.is_found else self.min_stock_gain

    def is_worth(self, candidate: Candidate, other: Candidate, reference: Candidate) -> bool:
        """Whether a candidate is a reason to leave a simpler one.

        It is faster beyond the error of the two numbers, or saves memory that matters. One that is slower has to save
        memory that matters, whatever its preference. One that runs today need only be no slower and no larger.
        """
        needed = self.needed(candidate, other)
        saves = _memory(candidate, other, reference) <= 1 - needed and self._matters(candidate, other)
        times, low, noise = self._speed(candidate, other, reference)
        is_slower = times * (1 + noise) < 1 - self.min_stock_gain
        if is_slower or saves:
            return saves
        if candidate.name == self.present and _memory(candidate, other, reference) <= 1 + self.min_stock_gain:
            return True
        return low >= 1 + needed

    def beats(self, candidate: Candidate, other: Candidate, reference: Candidate) -> bool:
        """Whether a candidate is at least as good as another in both numbers and worth more: nobody takes that one.

        Between equally simple ones the smallest difference counts.
        """
        memory, (times, _, _) = _memory(candidate, other, reference), self._speed(candidate, other, reference)
        if memory > 1 + 1e-9 or times < 1 - 1e-9:
            return False
        if candidate.simplicity <= other.simplicity:
            return memory < 1 - SAME or times > 1 + SAME
        return self.is_worth(candidate, other, reference)

    def _speed(self, candidate: Candidate, other: Candidate, reference: Candidate) -> tuple[float, float, float]:
        """Return throughput over the other's, its lower end, and the relative noise of what was measured.

        A prediction errs in what FP32 and lower precisions reach of a GPU, by as much as published runs tell. Two lower
        precisions predicted by one model err alike, so that their ratio has no such error.
        """
        own, others = (each.ratios(reference).throughput for each in (candidate, other))
        times = _divided(own, others)
        noise = max((_half_width(number) for number in (own, others) if number is not None), default=0.0)
        is_predicted = any(number is not None and number.kind == "predicted" for number in (own, others))
        if not is_predicted or bool(candidate.policy.low_precisions) == bool(other.policy.low_precisions):
            return times, times / (1 + noise), noise
        if not self.gpu:
            return times, times / (1 + RATIO_ERROR), noise
        if candidate.policy.low_precisions:
            return times, throughput_ratio_interval(times, gpu=self.gpu)[0], noise
        return times, 1 / throughput_ratio_interval(1 / times, gpu=self.gpu)[1], noise

    def _matters(self, candidate: Candidate, other: Candidate) -> bool:
        """Whether what is saved is worth having on this device, or makes the wanted batch fit."""
        own, more = candidate.outcome.peak_memory_bytes, other.outcome.peak_memory_bytes
        if own is None or more is None or own.kind != more.kind:
            return False
        limits = [limit for limit in (self.capacity_bytes, self.memory_budget_bytes) if limit is not None]
        if limits and own.value <= min(limits) < more.value:
            return True
        return self.capacity_bytes is None or more.value - own.value >= self.min_memory_share * self.capacity_bytes


def _memory(candidate: Candidate, other: Candidate, reference: Candidate) -> float:
    """Return memory over the other's; 1 where they cannot be compared."""
    return _divided(candidate.ratios(reference).memory, other.ratios(reference).memory)


def _divided(number: Number | None, other: Number | None) -> float:
    if number is None or other is None or number.kind != other.kind:
        return 1.0
    return number.value / other.value


def _half_width(number: Number) -> float:
    if number.low is None or number.high is None or number.low <= 0:
        return 0.0
    return max(number.high / number.value, number.value / number.low) - 1


def score(candidate: Candidate, reference: Candidate, prefer: Prefer) -> float:
    """Return the logarithm of how much better a candidate is than the reference by a preference: 0 is as good."""
    ratios = candidate.ratios(reference)
    smaller = 0.0 if ratios.memory is None else -math.log(ratios.memory.value)
    faster = 0.0 if ratios.throughput is None else math.log(ratios.throughput.value)
    return {"fastest": faster, "smallest": smaller, "balanced": faster + smaller}[prefer]


def best(
    candidates: Sequence[Candidate],
    reference: Candidate,
    prefer: Prefer,
    worth: Worth,
    *,
    skips: dict[str, float] | None = None,
) -> Candidate:
    """Return the one to use: the best by the preference among those that are worth leaving every simpler one for.

    Nothing that another candidate beats is returned, whatever the preference, and nothing that loses by it against
    the simplest.

    Args:
        candidates: the arms that may be used; `reference`, FP32, is among them where it may.
        skips: name -> share of the steps that its grad scaler skipped; of equal ones the arm that skips fewer.
    """
    skips = skips or {}
    worthy: list[Candidate] = []
    for each in sorted(candidates, key=lambda c: c.simplicity):
        simpler = [c for c in worthy if c.simplicity < each.simplicity]
        if all(worth.is_worth(each, other, reference) for other in simpler):
            worthy.append(each)
    unbeaten = [c for c in worthy if not any(worth.beats(o, c, reference) for o in candidates if o is not c)]
    left = unbeaten or [c for c in worthy if not any(worth.beats(o, c, reference) for o in worthy if o is not c)]
    top = max(score(c, reference, prefer) for c in left)
    near = [c for c in left if score(c, reference, prefer) >= top - SAME]
    return min(near, key=lambda c: (skips.get(c.name, c.outcome.skip_rate), c.simplicity, -score(c, reference, prefer)))


def in_order(candidates: Sequence[Candidate], reference: Candidate, prefer: Prefer, worth: Worth) -> list[Candidate]:
    """Return the candidates from the one to use, each the best of what the ones before it leave."""
    left, ordered = list(candidates), []
    while left:
        ordered.append(best(left, reference, prefer, worth))
        left.remove(ordered[-1])
    return ordered
