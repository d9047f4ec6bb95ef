"""The revert pass: groups of units that a proved policy keeps in FP32 for nothing are given back, one at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from autoprec.policy import Policy
from autoprec.search.parameters import Parameters
from autoprec.search.verification import Verification
from autoprec.search.worth import Candidate, Prefer, score
from autoprec.trials.target import TargetFigures

__all__ = ["Reverted", "give_back", "savings"]

MIN_GAIN = 0.01
"""A step that gains less of memory and time is not worth the runs of its proof."""
MAX_ATTEMPTS = 4
"""Groups that are tried; each costs the runs of one look."""

Prove = Callable[[str, Policy], tuple[Candidate, Verification]]
"""Train an arm of this name and policy on the proof's first seeds."""


@dataclass(frozen=True, slots=True)
class Reverted:
    """What the pass tried: each arm with the verification that holds its verdict, and the last that was accepted."""

    tried: tuple[tuple[Candidate, Verification], ...]
    accepted: Candidate | None


def savings(
    policy: Policy, parameters: Parameters, estimate: Callable[[Policy], TargetFigures], *, with_time: bool
) -> dict[str, float]:
    """Return decision -> the share of memory that it saves, by computed numbers, when it alone is given back.

    Only decisions in FP32 that may be left to autocast are looked at, and only savings of `MIN_GAIN` are returned, the
    largest first. `with_time` counts predicted time too: for a target that is here, where the proof measures it.
    """
    before = estimate(policy)
    found: dict[str, float] = {}
    for decision in parameters.free_decisions:
        if parameters.precision(policy, decision) == "fp32" and "autocast" in decision.choices:
            after = estimate(parameters.with_autocast(policy, decision))
            memory = 1 - after.peak_memory_bytes.value / before.peak_memory_bytes.value
            time = 1 - before.throughput_samples_per_second.value / after.throughput_samples_per_second.value
            found[decision.name] = max(memory, time) if with_time else memory
    worthwhile = {name: saved for name, saved in found.items() if saved >= MIN_GAIN}
    return dict(sorted(worthwhile.items(), key=lambda item: -item[1]))


def give_back(
    start: Candidate,
    reference: Candidate,
    *,
    saved: Mapping[str, float],
    parameters: Parameters,
    prefer: Prefer,
    prove: Prove,
) -> Reverted:
    """Leave the decisions in `saved` to autocast, one after the other, while the proof holds.

    A step is accepted where its arm is proved and better than the last accepted one by `MIN_GAIN` in its own numbers;
    a step that is not is undone and the next one tried.
    """
    current, tried = start, []
    by_name = {decision.name: decision for decision in parameters.free_decisions}
    for name in list(saved)[:MAX_ATTEMPTS]:
        policy = parameters.with_autocast(current.policy, by_name[name])
        candidate, verification = prove(f"{current.name}, {name} given back", policy)
        tried.append((candidate, verification))
        better = math.exp(score(candidate, reference, prefer) - score(current, reference, prefer))
        if verification.verdicts[candidate.name].kind == "proved" and better >= 1 + MIN_GAIN:
            current = candidate
    return Reverted(tuple(tried), None if current is start else current)
