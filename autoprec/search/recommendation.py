"""Choose what to use: a found policy, plain autocast or FP32, by what the proof allows and the numbers say."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from autoprec.policy import Policy
from autoprec.search.arms import AUTOCAST_BF16, AUTOCAST_FP16, BASELINES, FP32
from autoprec.search.verification import MIN_GAIN, Verdict, Verification, better_but_open
from autoprec.trials.outcome import Outcome

__all__ = ["Prefer", "PREFERENCES", "Candidate", "Choice", "rank", "choose", "gain"]

Prefer = Literal["balanced", "fastest", "smallest"]
PREFERENCES: tuple[Prefer, ...] = get_args(Prefer)
SIMPLICITY = (FP32, AUTOCAST_BF16, AUTOCAST_FP16)
"""From the simplest: FP32; BF16, which needs no grad scaler; FP16; then any found policy."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """An arm with the outcome that gives its memory and throughput."""

    name: str
    policy: Policy
    key: str
    outcome: Outcome

    @property
    def simplicity(self) -> int:
        return SIMPLICITY.index(self.name) if self.name in SIMPLICITY else len(SIMPLICITY)

    @property
    def is_found(self) -> bool:
        return self.name not in BASELINES


@dataclass(frozen=True, slots=True)
class Choice:
    """What is recommended. `policy` can always be applied; where nothing is recommended it is FP32's."""

    kind: Literal["policy", "autocast", "fp32", "inconclusive"]
    name: str
    policy: Policy
    sentence: str
    provisional: bool
    prefer: Prefer


def memory_ratio(candidate: Candidate, reference: Candidate) -> float:
    a, b = candidate.outcome.peak_memory_bytes, reference.outcome.peak_memory_bytes
    return a.value / b.value if a and b and b.value > 0 else 1.0


def throughput_ratio(candidate: Candidate, reference: Candidate) -> float:
    a, b = candidate.outcome.throughput_samples_per_second, reference.outcome.throughput_samples_per_second
    return a.value / b.value if a and b and a.value > 0 and b.value > 0 else 1.0


def gain(candidate: Candidate, reference: Candidate, prefer: Prefer) -> float:
    """Return how much better a candidate is than the reference: 0.1 is 10 %, negative is worse."""
    faster = math.log(throughput_ratio(candidate, reference))
    smaller = -math.log(memory_ratio(candidate, reference))
    total = {"fastest": faster, "smallest": smaller, "balanced": faster + smaller}[prefer]
    return math.expm1(total)


def rank(candidates: Sequence[Candidate], reference: Candidate, prefer: Prefer) -> list[Candidate]:
    """Return the candidates from the best; within `MIN_GAIN` of the best of what is left the simpler comes first."""
    left = list(candidates)
    ranked: list[Candidate] = []
    while left:
        gains = {id(c): gain(c, reference, prefer) for c in left}
        best = max(gains.values())
        near = [c for c in left if (1 + best) / (1 + gains[id(c)]) < 1 + MIN_GAIN]
        chosen = min(near, key=lambda c: (c.simplicity, -gains[id(c)]))
        ranked.append(chosen)
        left.remove(chosen)
    return ranked


def choose(
    candidates: Sequence[Candidate],
    verification: Verification,
    *,
    prefer: Prefer,
    target: str,
    target_is_here: bool,
) -> Choice:
    """Recommend the best candidate whose proof stands; with a better one still open, say so.

    Only where nothing but FP32 is proved and a better arm is open is the answer inconclusive.

    Args:
        candidates: the arms of the proof, FP32 among them.
        verification: the verdicts.
        prefer: what better means.
        target: the device that memory and throughput are for, in words.
        target_is_here: False makes the recommendation provisional.
    """
    reference = next(c for c in candidates if c.name == FP32)
    ranked = rank(candidates, reference, prefer)
    verdicts = verification.verdicts
    best = next(c for c in ranked if c is reference or (c.name in verdicts and verdicts[c.name].is_safe))
    by_name = {c.name: c for c in candidates if c.outcome.is_ok}
    gains = {name: gain(c, reference, prefer) for name, c in by_name.items()}
    open_arms = [by_name[name] for name in better_but_open(gains, verdicts)]
    if best is reference and open_arms:
        return _inconclusive(open_arms, reference, verification, prefer, target_is_here)
    kind: Literal["policy", "autocast", "fp32"] = (
        "fp32" if best is reference else "policy" if best.is_found else "autocast"
    )
    parts = [_main_clause(best, reference, ranked, verification, target)]
    if open_arms:
        parts.append(f"{_and(open_arms)} would be better but is not proved within the seeds of this proof")
    if not target_is_here:
        parts.append(f"provisional: {target} was not there; run `autoprec search` on it with --device cuda to verify")
    return Choice(kind, best.name, best.policy, "; ".join(parts) + ".", not target_is_here, prefer)


def _inconclusive(
    better: Sequence[Candidate], reference: Candidate, verification: Verification, prefer: Prefer, here: bool
) -> Choice:
    if not verification.verdicts:
        sentence = f"Inconclusive: {_and(better)} would use less memory or time, but nothing is verified yet."
        return Choice("inconclusive", FP32, reference.policy, sentence, not here, prefer)
    provable = verification.provable_margin
    could = "" if provable is None else f" (the smallest margin it could prove is {provable:.3f})"
    sentence = (
        f"Inconclusive: {_and(better)} would use less memory or time, but {verification.num_seeds} seeds of "
        f"{verification.proof.num_steps} steps cannot prove a margin of {verification.proof.margin:g}{could}; "
        "nothing is recommended, and the policy written is FP32."
    )
    return Choice("inconclusive", FP32, reference.policy, sentence, not here, prefer)


def _main_clause(
    best: Candidate, reference: Candidate, ranked: Sequence[Candidate], verification: Verification, target: str
) -> str:
    if best is reference:
        low = [c for c in ranked if c is not reference]
        refuted = [c for c in low if _kind(c, verification.verdicts) == "refuted"]
        why = (
            f"{_and(refuted)} lost accuracy or did not train"
            if refuted
            else "no lower precision saves at least 1 % here"
        )
        return f"Stay with FP32: {why}"
    memory, speed = memory_ratio(best, reference), throughput_ratio(best, reference)
    verdict = verification.verdicts[best.name]
    lost = f"accuracy within {verification.proof.margin:g} of FP32"
    if verdict.difference is not None:
        lost += f" (mean difference {verdict.difference.mean:+.4f}, {verdict.difference.num_values} paired seeds)"
    name = f"the found policy ({best.name})" if best.is_found else f"plain {_spoken(best.name)}"
    return f"Use {name}: {memory:.2f}x the memory and {speed:.2f}x the throughput of FP32 on {target}, {lost}"


def _kind(candidate: Candidate, verdicts: Mapping[str, Verdict]) -> str:
    if not candidate.outcome.is_ok:
        return "refuted"
    verdict = verdicts.get(candidate.name)
    return "open" if verdict is None else verdict.kind


def _spoken(name: str) -> str:
    return {AUTOCAST_FP16: "autocast FP16", AUTOCAST_BF16: "autocast BF16"}.get(name, name)


def _and(candidates: Sequence[Candidate]) -> str:
    names = [_spoken(c.name) for c in candidates]
    return names[0] if len(names) == 1 else ", ".join(names[:-1]) + " and " + names[-1]
