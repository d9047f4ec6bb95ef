"""Choose what to use, a found policy, plain autocast or FP32, by the proof and the numbers, and say so in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from autoprec.policy import Number, Policy
from autoprec.search.arms import FP32, PRESENT_POLICY
from autoprec.search.judging import Verdict
from autoprec.search.statistics import Interval
from autoprec.search.verification import Verification
from autoprec.search.worth import Candidate, Prefer, Worth, best, in_order
from autoprec.trials.outcome import Outcome

__all__ = ["Choice", "Telling", "choose", "order_of"]

ChoiceKind = Literal["policy", "autocast", "fp32", "inconclusive", "unproved"]
LAUNCH_BOUND = 0.9
"""Share of a step's predicted time that the host's launches take, from which on they are said to bind it."""
MAX_TOLD = 3
"""Arms of which a sentence says what became of them."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What is recommended. `policy` can always be applied; where nothing is recommended it is FP32's.

    "unproved" is the best by its trials alone, of a search that was asked for no proof.
    """

    kind: ChoiceKind
    name: str
    policy: Policy
    sentence: str
    provisional: bool
    prefer: Prefer


def order_of(
    candidates: Sequence[Candidate], prefer: Prefer, worth: Worth, memory_budget_bytes: float | None = None
) -> list[str]:
    """Return the names of the arms that could be used, from the best; FP32 is among them, whether it fits or not."""
    reference = next(c for c in candidates if c.name == FP32)
    usable = [c for c in candidates if c is reference or (c.outcome.is_ok and c.fits(memory_budget_bytes))]
    ranked = [c.name for c in in_order(usable, reference, prefer, worth)]
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
    worth: Worth | None = None,
    memory_budget_bytes: float | None = None,
    is_quick: bool = False,
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
        worth: what a gain has to be, and what the user runs today, against which gains are told.
        memory_budget_bytes: what uses more is not recommended.
        is_quick: no proof was asked for: the best by the trials is given, as not proved.
    """
    reference = next(c for c in candidates if c.name == FP32)
    worth = replace(worth or Worth(), memory_budget_bytes=memory_budget_bytes)
    here = target_is_here
    telling = Telling(candidates, reference, verification, worth, target)
    skips = {name: verdict.skip_rate for name, verdict in verification.verdicts.items()}
    usable = [c for c in candidates if c.outcome.is_ok and c.fits(memory_budget_bytes)]

    def pick(of: Sequence[Candidate]) -> Candidate:
        return best(of, reference, prefer, worth, skips=skips)

    if is_quick and usable:
        quick = pick(usable)
        sentence = f"Not proved: by short trials alone {telling.spoken(quick)} would be used{telling.gains(quick)}"
        return Choice("unproved", quick.name, quick.policy, f"{sentence}; no proof was asked for.", True, prefer)
    learned = verification.learned
    if learned is not None and not learned.is_shown and len(candidates) > 1:
        return _inconclusive(reference, telling.why_open([c for c in usable if c is not reference]), prefer, here)
    safe = [c for c in usable if c is reference or telling.is_safe(c)]
    is_open = [c for c in usable if c not in safe and telling.kind(c) in ("open", "insensitive", "unknown")]
    better = [c for c in is_open if pick([*safe, c]) is c]
    chosen = pick(safe) if safe else None
    if chosen is None and not better:
        assert memory_budget_bytes is not None
        why = f"no policy that is proved fits a memory budget of {_size(memory_budget_bytes)}"
        return _inconclusive(reference, why, prefer, here)
    if chosen is None or (chosen is reference and better):
        return _inconclusive(reference, telling.why_open(better), prefer, here)
    kind: ChoiceKind = "fp32" if chosen is reference else "policy" if chosen.is_found else "autocast"
    parts = [telling.main_clause(chosen)]
    if better:
        parts.append(f"{telling.several(better)} would be better but {telling.state_of(better)}")
    if not here and chosen is not reference:
        parts.append(f"provisional: {target} was not there; run `autoprec verify` on it with --device cuda")
    elif not here:
        parts.append(f"provisional: {target} was not there")
    return Choice(kind, chosen.name, chosen.policy, "; ".join(parts) + ".", not here, prefer)


def _inconclusive(reference: Candidate, why: str, prefer: Prefer, here: bool) -> Choice:
    sentence = f"Inconclusive: {why}; nothing is recommended, and the policy written is FP32."
    return Choice("inconclusive", FP32, reference.policy, sentence, not here, prefer)


@dataclass(frozen=True)
class Telling:
    """The words of a recommendation: each clause from the arms and verdicts that it is about."""

    candidates: Sequence[Candidate]
    reference: Candidate
    verification: Verification
    worth: Worth
    target: str

    @classmethod
    def of_proof(cls, verification: Verification) -> Telling:
        """Return the words of a proof without a recommendation."""
        none = Candidate(FP32, Policy(default="fp32"), FP32, Outcome(kind="ok"))
        return cls([none], none, verification, Worth(), "")

    @property
    def present(self) -> Candidate:
        return next((c for c in self.candidates if c.name == self.worth.present and c.outcome.is_ok), self.reference)

    def kind(self, candidate: Candidate) -> str:
        verdict = self.verification.verdicts.get(candidate.name)
        return "unknown" if verdict is None else verdict.kind

    def is_safe(self, candidate: Candidate) -> bool:
        verdict = self.verification.verdicts.get(candidate.name)
        return verdict is not None and verdict.is_safe

    def spoken(self, candidate: Candidate) -> str:
        """Name an arm as an engineer would."""
        name = candidate.name
        if candidate.is_found:
            return f"the found policy ({name})"
        if name.startswith(PRESENT_POLICY):
            return "the present policy"
        if name == FP32:
            return "FP32"
        return "plain " + name.replace("fp16", "FP16").replace("bf16", "BF16").replace("init_scale ", "init_scale=")

    def several(self, candidates: Sequence[Candidate]) -> str:
        names = [self.spoken(c).removeprefix("plain ") for c in candidates]
        return names[0] if len(names) == 1 else ", ".join(names[:-1]) + " and " + names[-1]

    def main_clause(self, chosen: Candidate) -> str:
        if chosen is self.reference:
            return f"Stay with FP32: {self._why_fp32()}" if self.present is chosen else f"Use FP32: {self._why_fp32()}"
        verb = "Keep" if chosen is self.present else "Use"
        clause = f"{verb} {self.spoken(chosen)}{self.gains(chosen)}"
        if chosen is self.present:
            share = f"{self.worth.min_gain:.0%}"
            clause += f"; nothing that was tried is faster than it by {share}, or saves {share} and {self._matters()}"
        own, other = self._verdict(chosen), self._verdict(self.present)
        if own is not None and other is not None and own.skip_rate < other.skip_rate:
            clause += f"; its grad scaler skips {own.skip_rate:.1%} of the steps, that one's {other.skip_rate:.1%}"
        return f"{clause}; {self.accuracy(chosen)}"

    def gains(self, chosen: Candidate) -> str:
        """Say memory and throughput over what the user runs today, then over FP32."""
        against = [self.present] if self.present is self.reference else [self.present, self.reference]
        against = [each for each in against if each is not chosen]
        told = []
        for other in against:
            own, base = chosen.ratios(self.reference), other.ratios(self.reference)
            memory, times = _over(own.memory, base.memory), _over(own.throughput, base.throughput)
            amount = "" if other is not against[0] else _bytes_between(chosen, other)
            told.append(f"{memory} the memory{amount} and {times} the throughput of {self.spoken(other)}")
        return f": {', '.join(told)}, on {self.target}" if told else ""

    def accuracy(self, chosen: Candidate) -> str:
        """Say what the proof showed of the metric, with its interval in the metric's own direction."""
        verdict, found = self.verification.verdicts[chosen.name], self.verification
        difference = verdict.difference
        if difference is None:
            return "proved"
        shared = "" if found.proof.margin is not None else f" ({found.proof.max_lost_share:.0%} of what FP32 gained)"
        word = "below" if found.metric.higher_is_better else "above"
        margin = "the margin" if verdict.margin is None else f"{verdict.margin:.3g}"
        return (
            f"proved: {found.metric.name} at most {margin}{shared} {word} FP32's ({self.difference(difference)}; "
            f"{difference.num_values} paired seeds of {found.num_steps} steps)"
        )

    def difference(self, found: Interval) -> str:
        """Tell a difference to FP32 and its bounds, in the metric's own direction."""
        sign = 1 if self.verification.metric.higher_is_better else -1
        low, high = sorted((sign * found.low, sign * found.high))
        return f"difference {sign * found.mean:+.4g}, between {low:+.4g} and {high:+.4g}"

    def _why_fp32(self) -> str:
        told = [each for each in map(self._lost, self.candidates) if each][:MAX_TOLD]
        lower = [c for c in self.candidates if c is not self.reference and c.outcome.is_ok and self.is_safe(c)]
        if lower or not told:
            share = self.reference.outcome.launch_share
            if share is not None and share >= LAUNCH_BOUND:
                told.append(
                    f"the step is bound by launches ({share:.0%} of its predicted time), which no precision makes "
                    "fewer; a larger batch, torch.compile and CUDA graphs do"
                )
            told.append(
                f"no lower precision is proved and faster beyond the error of its figure, or saves {self._matters()}"
            )
        return "; ".join(told)

    def _matters(self) -> str:
        """Say how much memory is worth having on the target."""
        if self.worth.capacity_bytes is None:
            return "memory"
        least = self.worth.min_memory_share * self.worth.capacity_bytes / 2**30
        return f"the {least:.2f} GiB that would matter on {self.target}"

    def _lost(self, candidate: Candidate) -> str:
        """Say why an arm is not used for what happened in its runs; "" where it was not for that."""
        outcome, verdict = candidate.outcome, self.verification.verdicts.get(candidate.name)
        name = self.spoken(candidate).removeprefix("plain ")
        if not outcome.is_ok:
            what = "did not train" if outcome.blames_precision else "could not be tried"
            return f"{name} {what} ({outcome.kind}: {outcome.message[:120]})"
        if verdict is not None and verdict.kind == "refuted":
            return f"{name} is refuted ({verdict.reason})"
        return f"{name} {verdict.reason}" if verdict is not None and verdict.kind == "failed" else ""

    def state_of(self, better: Sequence[Candidate]) -> str:
        kinds = {self.kind(c) for c in better}
        if kinds == {"unknown"}:
            return "is not verified" if len(better) == 1 else "are not verified"
        reason = next((v.reason for c in better if (v := self._verdict(c)) is not None and v.difference is None), "")
        return reason or "is not proved within the seeds of this proof"

    def _verdict(self, candidate: Candidate) -> Verdict | None:
        return self.verification.verdicts.get(candidate.name)

    def why_open(self, better: Sequence[Candidate]) -> str:
        """Say why nothing is proved, as what it is: no proof, too little learned, an end of its own kind, or noise."""
        would = f"{self.several(better)} would use less memory or time, but" if better else ""
        verdicts = [v for c in better if (v := self._verdict(c)) is not None]
        if not verdicts:
            return f"{would} nothing is verified yet"
        if any(v.kind == "insensitive" for v in verdicts):
            return self.insensitive(verdicts)
        untested = next((v.reason for v in verdicts if v.difference is None), None)
        if untested is not None:
            return f"{would} the proof {_ended(untested)}"
        return self._too_noisy(would, better, verdicts)

    def insensitive(self, verdicts: Sequence[Verdict]) -> str:
        found, learned = self.verification, self.verification.learned
        if learned is None or learned.metric is None:
            return f"{found.metric.name} at FP32's start weights is no number, so that no gain can be shown"
        if learned.metric.is_shown:
            return next(v.reason for v in verdicts if v.kind == "insensitive")
        gain, sign = learned.metric.interval, 1 if found.metric.higher_is_better else -1
        start = sign * learned.metric.start
        moved = f"{start:.4g} at the start weights to {start + sign * gain.mean:.4g}"
        needed = found.num_steps_needed
        least = found.proof.sensitivity * learned.metric.margin
        shown = "no gain is shown" if gain.low <= 0 else f"a gain of {gain.low:.3g} is shown, {least:.3g} is needed"
        longer = (
            f"about {needed} steps would probably do (--proof-steps {needed})"
            if needed
            else "whether longer runs would do is not in sight; look at the learning rate and its warm-up"
        )
        return (
            f"FP32 itself learned too little for a proof: in {learned.num_steps} steps its {found.metric.name} went "
            f"from {moved} (over {gain.num_values} seeds {shown}), and a policy that learns nothing would look as "
            f"good; {longer}"
        )

    def _too_noisy(self, would: str, better: Sequence[Candidate], verdicts: Sequence[Verdict]) -> str:
        found = self.verification
        margin, provable, needed = found.margin or 0.0, found.provable_margin, found.num_seeds_needed
        runs = f"{found.num_seeds} seeds of {found.num_steps} steps"
        noise = "" if found.noise is None else f"; FP32 against itself differs by {found.noise:.3g}"
        name = found.metric.name
        if provable is not None and provable < margin:
            means = ", ".join(f"{v.difference.mean:+.4f}" for v in verdicts if v.difference is not None)
            return (
                f"{would} {runs} leave open whether {name} stays within {margin:.3g} of FP32 (mean difference {means});"
                f" an equal one would have been proved{noise}"
            )
        could = "" if provable is None else f" (the smallest margin it could prove is {provable:.3g})"
        if noise:
            noise += f", which needs {'more than 1000' if needed is None else f'about {needed}'} seeds"
        return f"{would} {runs} cannot prove a margin of {margin:.3g} of {name}{could}{noise}"


ADVICE = {"timeout:": "; give a longer --trial-timeout", "out_of_memory:": "; give a smaller --batch-size"}
"""What helps against an end that says nothing of precision, by how its reason is told."""


def _ended(reason: str) -> str:
    return f"could not be made: {reason}" + next((advice for end, advice in ADVICE.items() if end in reason), "")


def _over(ratio: Number | None, base: Number | None) -> str:
    """Show a ratio over another arm's; FP32 has none of its own, and is 1."""
    if ratio is None:
        return "?x"
    return f"{ratio.value / (1.0 if base is None else base.value):.2f}x"


def _bytes_between(chosen: Candidate, other: Candidate) -> str:
    own, base = chosen.outcome.peak_memory_bytes, other.outcome.peak_memory_bytes
    return "" if own is None or base is None else f" ({_size(own.value)} instead of {_size(base.value)})"


def _size(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 0.1 * 2**30 else f"{num_bytes / 2**20:.1f} MiB"
