"""Choose what to use: a found policy, plain autocast or FP32, by what the proof allows and the numbers say."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from autoprec.errors import UsageError, did_you_mean
from autoprec.estimates import RATIO_ERROR
from autoprec.policy import Number, Policy
from autoprec.search.arms import AUTOCAST_BF16, AUTOCAST_FP16, BASELINES, FP32
from autoprec.search.judging import Verdict, better_but_open
from autoprec.search.ratios import NO_RATIOS, Ratios, counted, outcome_ratios
from autoprec.search.verification import Verification
from autoprec.trials.outcome import Outcome

__all__ = [
    "MIN_GAIN",
    "Prefer",
    "PREFERENCES",
    "Candidate",
    "Choice",
    "as_preference",
    "rank",
    "order_of",
    "choose",
    "gain",
]

MIN_GAIN = 0.01
"""Differences in memory or throughput below this share are no reason to leave the simpler policy."""
Prefer = Literal["balanced", "fastest", "smallest"]
PREFERENCES: tuple[Prefer, ...] = get_args(Prefer)
SIMPLICITY = (FP32, AUTOCAST_BF16, AUTOCAST_FP16)
"""From the simplest: FP32; BF16, which needs no grad scaler; FP16; then any found policy."""


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

    `paired` holds its ratios to FP32 over the pairs of a proof; where it has none, those of the outcomes stand.
    """

    name: str
    policy: Policy
    key: str
    outcome: Outcome
    paired: Ratios = NO_RATIOS

    @property
    def simplicity(self) -> int:
        return SIMPLICITY.index(self.name) if self.name in SIMPLICITY else len(SIMPLICITY)

    @property
    def is_found(self) -> bool:
        return self.name not in BASELINES

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
class Choice:
    """What is recommended. `policy` can always be applied; where nothing is recommended it is FP32's."""

    kind: Literal["policy", "autocast", "fp32", "inconclusive"]
    name: str
    policy: Policy
    sentence: str
    provisional: bool
    prefer: Prefer


def gain(candidate: Candidate, reference: Candidate, prefer: Prefer) -> float:
    """Return how much better a candidate is than the reference: 0.1 is 10 %, negative is worse.

    A predicted throughput can be wrong by `RATIO_ERROR`: it is no reason to prefer anything. It counts where it says
    that a candidate is slower by more than that, and every preference goes by memory instead. A measured ratio counts
    with the end of its interval nearest to 1.
    """
    ratios = candidate.ratios(reference)
    smaller = -math.log(counted(ratios.memory))
    faster = math.log(counted(ratios.throughput))
    if ratios.throughput is not None and ratios.throughput.kind == "predicted":
        slower = min(0.0, faster + math.log1p(RATIO_ERROR))
        return math.expm1(smaller if prefer == "smallest" else smaller + slower)
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


def order_of(candidates: Sequence[Candidate], prefer: Prefer, memory_budget_bytes: float | None = None) -> list[str]:
    """Return the names of the arms that could be used, from the best; FP32 is among them, whether it fits or not."""
    reference = next(c for c in candidates if c.name == FP32)
    usable = [c for c in candidates if c is reference or (c.outcome.is_ok and c.fits(memory_budget_bytes))]
    ranked = [c.name for c in rank(usable, reference, prefer)]
    if reference.fits(memory_budget_bytes):
        return ranked
    return [*(name for name in ranked if name != FP32), FP32]


def choose(
    candidates: Sequence[Candidate],
    verification: Verification,
    *,
    prefer: Prefer,
    target: str,
    target_is_here: bool,
    memory_budget_bytes: float | None = None,
) -> Choice:
    """Recommend the best candidate whose proof stands; with a better one still open, say so.

    Only where nothing but FP32 is proved and a better arm is open, or where nothing that is proved fits the budget, is
    the answer inconclusive.

    Args:
        candidates: the arms of the proof, FP32 among them.
        verification: the verdicts.
        prefer: what better means.
        target: the device that memory and throughput are for, in words.
        target_is_here: False makes the recommendation provisional.
        memory_budget_bytes: what uses more is not recommended.
    """
    by_name = {c.name: c for c in candidates}
    reference = by_name[FP32]
    verdicts = verification.verdicts
    order = order_of(candidates, prefer, memory_budget_bytes)
    best = next(by_name[n] for n in order if n == FP32 or (n in verdicts and verdicts[n].is_safe))
    open_arms = [by_name[name] for name in better_but_open(order, verdicts)]
    here = target_is_here
    if best is reference and open_arms:
        return _inconclusive(reference, _why_open(open_arms, verification), prefer, here)
    if not best.fits(memory_budget_bytes):
        assert memory_budget_bytes is not None
        why = f"no policy that is proved fits {_gib(memory_budget_bytes)}"
        return _inconclusive(reference, why, prefer, here)
    kind: Literal["policy", "autocast", "fp32"] = (
        "fp32" if best is reference else "policy" if best.is_found else "autocast"
    )
    parts = [_main_clause(best, reference, candidates, verification, target)]
    if open_arms:
        parts.append(f"{_and(open_arms)} would be better but is not proved within the seeds of this proof")
    if prefer == "fastest" and _is_predicted(reference):
        parts.append("throughput is only predicted, so memory decided")
    if not here:
        parts.append(f"provisional: {target} was not there; run `autoprec verify` on it with --device cuda")
    return Choice(kind, best.name, best.policy, "; ".join(parts) + ".", not here, prefer)


def _is_predicted(candidate: Candidate) -> bool:
    throughput = candidate.outcome.throughput_samples_per_second
    return throughput is not None and throughput.kind == "predicted"


def _inconclusive(reference: Candidate, why: str, prefer: Prefer, here: bool) -> Choice:
    sentence = f"Inconclusive: {why}; nothing is recommended, and the policy written is FP32."
    return Choice("inconclusive", FP32, reference.policy, sentence, not here, prefer)


def _why_open(better: Sequence[Candidate], verification: Verification) -> str:
    would = f"{_and(better)} would use less memory or time, but"
    if not verification.verdicts:
        return f"{would} nothing is verified yet"
    provable, needed, margin = verification.provable_margin, verification.num_seeds_needed, verification.proof.margin
    runs = f"{verification.num_seeds} seeds of {verification.proof.num_steps} steps"
    noise = "" if verification.noise is None else f"; FP32 against itself differs by {verification.noise:.3f}"
    if provable is not None and provable < margin:
        return (
            f"{would} {runs} leave open whether accuracy stays within {margin:g} of FP32"
            f"{_mean_differences(better, verification)}; an equal one would have been proved{noise}"
        )
    could = "" if provable is None else f" (the smallest margin it could prove is {provable:.3f})"
    if noise:
        noise += f", which needs {'more than 1000' if needed is None else f'about {needed}'} seeds"
    return f"{would} {runs} cannot prove a margin of {margin:g}{could}{noise}"


def _mean_differences(candidates: Sequence[Candidate], verification: Verification) -> str:
    verdicts = [verification.verdicts.get(c.name) for c in candidates]
    means = [f"{v.difference.mean:+.4f}" for v in verdicts if v is not None and v.difference is not None]
    return f" (mean difference {', '.join(means)})" if means else ""


def _main_clause(
    best: Candidate, reference: Candidate, candidates: Sequence[Candidate], verification: Verification, target: str
) -> str:
    if best is reference:
        refuted = [c for c in candidates if _is_refuted(c, verification.verdicts)]
        why = (
            f"{_and(refuted)} lost accuracy or did not train"
            if refuted
            else "no lower precision saves at least 1 % here"
        )
        return f"Stay with FP32: {why}"
    ratios = best.ratios(reference)
    verdict = verification.verdicts[best.name]
    lost = f"accuracy within {verification.proof.margin:g} of FP32"
    if verdict.difference is not None:
        lost += f" (mean difference {verdict.difference.mean:+.4f}, {verdict.difference.num_values} paired seeds)"
    name = f"the found policy ({best.name})" if best.is_found else f"plain {_spoken(best.name)}"
    saved = f"{_times(ratios.memory)} the memory and {_times(ratios.throughput)} the throughput of FP32"
    return f"Use {name}: {saved} on {target}, {lost}"


def _times(ratio: Number | None) -> str:
    return "?x" if ratio is None else f"{ratio.value:.2f}x"


def _is_refuted(candidate: Candidate, verdicts: Mapping[str, Verdict]) -> bool:
    verdict = verdicts.get(candidate.name)
    return not candidate.outcome.is_ok or (verdict is not None and verdict.kind == "refuted")


def _spoken(name: str) -> str:
    return {AUTOCAST_FP16: "autocast FP16", AUTOCAST_BF16: "autocast BF16"}.get(name, name)


def _gib(num_bytes: float) -> str:
    return f"a memory budget of {num_bytes / 2**30:.2f} GiB"


def _and(candidates: Sequence[Candidate]) -> str:
    names = [_spoken(c.name) for c in candidates]
    return names[0] if len(names) == 1 else ", ".join(names[:-1]) + " and " + names[-1]
