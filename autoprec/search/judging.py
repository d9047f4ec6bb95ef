"""What the runs of a proof say of one arm."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from autoprec.policy import Policy
from autoprec.search.arms import FP32
from autoprec.search.metric import Metric
from autoprec.search.proof import Proof
from autoprec.search.sensitivity import Sensitivity
from autoprec.search.statistics import Interval, interval
from autoprec.trials.outcome import EndKind, Headroom, Outcome

__all__ = [
    "ENDS",
    "Contender",
    "Verdict",
    "VerdictKind",
    "better_but_open",
    "is_indistinct",
    "judge",
    "reason_to_stop",
    "told_end",
]

VerdictKind = Literal["reference", "proved", "refuted", "open", "insensitive", "failed"]

ENDS: Mapping[EndKind, str] = {
    "out_of_memory": "ran out of memory",
    "timeout": "ran out of time",
    "crashed": "ended its process",
    "unsupported": "is refused by an operator",
    "user_error": "makes the task raise an error",
    "non_finite_loss": "gave a loss that is not finite",
    "scale_collapsed": "let the loss scale fall without end",
    "no_step_taken": "overflowed at every step",
    "non_finite_buffer": "poisoned a buffer",
    "aborted": "fell too far behind FP32",
}
"""What an end is called in a sentence about an arm."""
INDISTINCT = 1e-3
"""Share of FP32's gain below which a difference is none: where every run predicts one class a few ties still turn."""
CANNOT_RUN: frozenset[EndKind] = frozenset({"unsupported", "user_error"})
"""Ends that come again on every seed and with any limit: the arm cannot be used here, which leaves nothing open."""


@dataclass(frozen=True, slots=True)
class Contender:
    """An arm of the proof: a baseline or a finalist."""

    name: str
    policy: Policy
    key: str
    perturbation: float = 0.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the proof says of one arm.

    Attributes:
        kind: "proved": not worse than FP32 by more than the margin. "refuted": it is. "open": the runs cannot tell.
            "insensitive": FP32 learned too little for the runs to tell anything. "failed": the arm cannot run here,
            for a reason that says nothing of its precision.
        difference: of the metric to FP32's, with the half-width at the level at which the arm could be proved; None
            where a run failed or came too near the end of FP16: then the metric was not tested.
        loss_excess: of the held-out loss over FP32's, relative to FP32's mean.
        margin: how much worse the metric may be, in its units.
        skip_rate: share of the steps that the grad scaler skipped, over all runs.
    """

    kind: VerdictKind
    difference: Interval | None
    reason: str
    loss_excess: Interval | None = None
    margin: float | None = None
    skip_rate: float = 0.0

    @property
    def is_safe(self) -> bool:
        return self.kind in ("reference", "proved")


def better_but_open(order: Sequence[str], verdicts: Mapping[str, Verdict]) -> list[str]:
    """Return the open arms that would be used if they were proved, the best first; `order` as in `verify`."""
    better = itertools.takewhile(lambda name: name != FP32 and not _is_safe(name, verdicts), order)
    return [name for name in better if name not in verdicts or verdicts[name].kind in ("open", "insensitive")]


def _is_safe(name: str, verdicts: Mapping[str, Verdict]) -> bool:
    return name in verdicts and verdicts[name].is_safe


def judge(
    contender: Contender,
    reference: Contender,
    known: Mapping[tuple[str, int], Outcome],
    num_seeds: int,
    proof: Proof,
    metric: Metric,
    learned: Sensitivity,
    *,
    level: float,
) -> Verdict:
    """Judge one arm on the first `num_seeds` seeds.

    Both the metric and, where FP32 lowered it, the held-out loss must be shown not to be worse than the margin: two
    tests that must both hold need no correction. A metric in which the arm never differs from FP32 (every run predicts
    one class) tells nothing, so that there the loss must have been lowered.

    Args:
        learned: what FP32 gained on these seeds.
        level: the chance to prove the arm wrongly at this look. To refute wrongly costs a gain and harms nobody: it has
            the look's whole error, whatever other arms there are.
    """
    if contender is reference:
        return Verdict("reference", None, "the reference of the comparison")
    stopped = reason_to_stop(contender, known, proof)
    if stopped is not None:
        return stopped
    pairs = []
    for index in range(num_seeds):
        own, fp32 = known.get((contender.key, index)), known.get((reference.key, index))
        if fp32 is not None and not fp32.is_ok:
            return Verdict("open", None, f"FP32 itself {told_end(fp32)} on seed {index}"[:500])
        if own is None or fp32 is None or own.accuracy is None or fp32.accuracy is None:
            return Verdict("open", None, f"seed {index} was not run")
        pairs.append((own, fp32))
    difference = _difference(pairs, proof, metric, learned, level=level)
    losses = [(own.eval_loss.value, fp32.eval_loss.value) for own, fp32 in pairs if own.eval_loss and fp32.eval_loss]
    excess = _loss_excess(losses, proof) if len(losses) == num_seeds else None
    margin = learned.metric.margin if learned.metric is not None else proof.margin
    verdict = Verdict("open", difference, "", excess, margin, _skip_rate(contender, known))
    return _decided(verdict, pairs, proof, metric, learned, level)


def _decided(
    verdict: Verdict,
    pairs: Sequence[tuple[Outcome, Outcome]],
    proof: Proof,
    metric: Metric,
    learned: Sensitivity,
    level: float,
) -> Verdict:
    def told(kind: VerdictKind, reason: str) -> Verdict:
        return Verdict(kind, verdict.difference, reason, verdict.loss_excess, verdict.margin, verdict.skip_rate)

    if not learned.is_shown:
        return told("insensitive", f"FP32 itself learned too little in {learned.num_steps} steps for a margin")
    margin = f"{learned.metric.margin:.3g}" if learned.metric is not None else ""
    kept = [_kept(own, fp32, proof) for own, fp32 in pairs]
    if interval(kept, alpha=proof.alpha_per_look, resolution=metric.resolution).high < 0:
        return told("refuted", f"{metric.name} worse than FP32's by more than {margin}")
    values = [(own.accuracy.value, fp32.accuracy.value) for own, fp32 in pairs]  # type: ignore[union-attr]
    never_differs = is_indistinct(values, learned)
    tests_loss = learned.loss_is_shown and not metric.is_loss
    if tests_loss:
        kept_loss = [_kept_loss(own, fp32, proof) for own, fp32 in pairs]
        if interval(kept_loss, alpha=proof.alpha_per_look).high < 0:
            return told("refuted", f"held-out loss keeps less than {1 - proof.max_lost_share:.0%} of what FP32 gained")
        if interval(kept_loss, alpha=level).low <= 0:
            return told("open", f"{len(pairs)} seeds cannot tell by the held-out loss")
    elif verdict.loss_excess is not None and verdict.loss_excess.low > proof.loss_margin:
        return told("refuted", f"held-out loss above FP32's by more than {proof.loss_margin:.0%}")
    if never_differs and not tests_loss and not metric.is_loss:
        return told("insensitive", f"{metric.name} never differs from FP32's, and FP32 did not lower the held-out loss")
    if interval(kept, alpha=level, resolution=metric.resolution).low > 0:
        return told("proved", f"{metric.name} not worse than FP32's by more than {margin}")
    return told("open", f"{len(pairs)} seeds cannot tell")


def is_indistinct(pairs: Sequence[tuple[float, float]], learned: Sensitivity) -> bool:
    """Whether a metric is the same in all pairs, or differs by less than `INDISTINCT` of what FP32 gained."""
    least = 0.0 if learned.metric is None else INDISTINCT * max(0.0, learned.metric.interval.mean)
    return all(abs(own - fp32) <= least for own, fp32 in pairs)


def _difference(
    pairs: Sequence[tuple[Outcome, Outcome]], proof: Proof, metric: Metric, learned: Sensitivity, *, level: float
) -> Interval:
    """Return the mean difference of the metric; its half-width is that of the test, so that the two never disagree."""
    differences = [own.accuracy.value - fp32.accuracy.value for own, fp32 in pairs]  # type: ignore[union-attr]
    tested = differences if learned.metric is None else [_kept(own, fp32, proof) for own, fp32 in pairs]
    spread = interval(tested, alpha=level, resolution=metric.resolution)
    return Interval(spread.num_values, statistics.fmean(differences), spread.half_width)


def _kept(own: Outcome, fp32: Outcome, proof: Proof) -> float:
    """Return by how much an arm is better than the margin allows, in units of the metric.

    The relative margin is a linear contrast of paired values, own - (1 - f) fp32 - f start, so that the share f is
    tested without dividing by a gain that is itself uncertain.
    """
    difference = own.accuracy.value - fp32.accuracy.value  # type: ignore[union-attr]
    if proof.margin is not None:
        return difference + proof.margin
    return difference + proof.max_lost_share * (fp32.accuracy.value - fp32.start_accuracy.value)  # type: ignore[union-attr]


def _kept_loss(own: Outcome, fp32: Outcome, proof: Proof) -> float:
    gain = fp32.start_eval_loss.value - fp32.eval_loss.value  # type: ignore[union-attr]
    return fp32.eval_loss.value - own.eval_loss.value + proof.max_lost_share * gain  # type: ignore[union-attr]


def reason_to_stop(contender: Contender, known: Mapping[tuple[str, int], Outcome], proof: Proof) -> Verdict | None:
    """Return the verdict on an arm that needs no more runs, on whatever seed that showed; None where it does."""
    runs = {index: outcome for (key, index), outcome in known.items() if key == contender.key}
    ended = next(((index, outcome) for index, outcome in sorted(runs.items()) if not outcome.is_ok), None)
    if ended is not None:
        index, outcome = ended
        kind: VerdictKind = (
            "refuted" if outcome.blames_precision else "failed" if outcome.kind in CANNOT_RUN else "open"
        )
        return Verdict(kind, None, f"{told_end(outcome)} on seed {index}"[:500])
    near = _nearest_to_overflow(runs)
    if near is not None and near.largest > proof.max_half:
        where = f"module {near.module!r}: too near to the end of FP16, 65,504"
        return Verdict("refuted", None, f"a half value reached {near.largest:,.0f} in {where}"[:500])
    return None


def told_end(outcome: Outcome) -> str:
    """Say how a run ended, as what an arm did: "ran out of time (after 16 s)"."""
    return f"{ENDS.get(outcome.kind, outcome.kind)} ({outcome.kind}: {outcome.message})"


def _nearest_to_overflow(runs: Mapping[int, Outcome]) -> Headroom | None:
    found = [outcome.headroom for outcome in runs.values() if outcome.headroom is not None]
    return max(found, key=lambda headroom: headroom.largest, default=None)


def _skip_rate(contender: Contender, known: Mapping[tuple[str, int], Outcome]) -> float:
    return statistics.fmean([o.skip_rate for (key, _), o in known.items() if key == contender.key] or [0.0])


def _loss_excess(losses: Sequence[tuple[float, float]], proof: Proof) -> Interval:
    """Return the paired excess of the loss over FP32's, relative to the size of FP32's mean."""
    scale = abs(statistics.fmean(fp32 for _, fp32 in losses)) or 1e-3
    return interval([(own - fp32) / scale for own, fp32 in losses], alpha=proof.alpha_per_look)
