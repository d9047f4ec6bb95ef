"""What the runs of a proof say of one arm."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from autoprec.policy import Policy
from autoprec.search.arms import FP32
from autoprec.search.proof import Proof
from autoprec.search.statistics import Interval, interval
from autoprec.trials.outcome import Headroom, Outcome

__all__ = ["Contender", "Verdict", "VerdictKind", "better_but_open", "judge", "reason_to_stop"]

VerdictKind = Literal["reference", "proved", "refuted", "open"]


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
        difference: of the metric to FP32's, with the half-width at the level at which the arm could be proved; None
            where a run failed or came too near the end of FP16: then the metric was not tested.
        loss_excess: of the held-out loss over FP32's, relative to FP32's mean.
    """

    kind: VerdictKind
    difference: Interval | None
    reason: str
    loss_excess: Interval | None = None

    @property
    def is_safe(self) -> bool:
        return self.kind in ("reference", "proved")


def better_but_open(order: Sequence[str], verdicts: Mapping[str, Verdict]) -> list[str]:
    """Return the open arms that would be used if they were proved, the best first; `order` as in `verify`."""
    better = itertools.takewhile(lambda name: name != FP32 and not _is_safe(name, verdicts), order)
    return [name for name in better if name not in verdicts or verdicts[name].kind == "open"]


def _is_safe(name: str, verdicts: Mapping[str, Verdict]) -> bool:
    return name in verdicts and verdicts[name].is_safe


def judge(
    contender: Contender,
    reference: Contender,
    known: Mapping[tuple[str, int], Outcome],
    num_seeds: int,
    proof: Proof,
    resolution: float,
    *,
    level: float,
) -> Verdict:
    """Judge one arm on the first `num_seeds` seeds.

    `level` is the chance to prove it wrongly at this look. To refute wrongly costs a gain and harms nobody: it has the
    look's whole error, whatever other arms there are.
    """
    if contender is reference:
        return Verdict("reference", None, "the reference of the comparison")
    why_out = reason_to_stop(contender, known, proof)
    if why_out is not None:
        return Verdict("refuted", None, why_out[:500])
    differences, losses = [], []
    for index in range(num_seeds):
        own, fp32 = known.get((contender.key, index)), known.get((reference.key, index))
        if own is None or fp32 is None or own.accuracy is None or fp32.accuracy is None:
            return Verdict("open", None, f"FP32 gave no number on seed {index}")
        differences.append(own.accuracy.value - fp32.accuracy.value)
        if own.eval_loss is not None and fp32.eval_loss is not None:
            losses.append((own.eval_loss.value, fp32.eval_loss.value))
    difference = interval(differences, alpha=level, resolution=resolution)
    narrow = interval(differences, alpha=proof.alpha_per_look, resolution=resolution)
    excess = _loss_excess(losses, proof) if len(losses) == num_seeds else None
    if narrow.high < -proof.margin:
        return Verdict("refuted", difference, f"worse than FP32 by more than {proof.margin:g}", excess)
    if excess is not None and excess.low > proof.loss_margin:
        reason = f"held-out loss above FP32's by more than {proof.loss_margin:.0%}"
        return Verdict("refuted", difference, reason, excess)
    if difference.low > -proof.margin:
        return Verdict("proved", difference, f"not worse than FP32 by more than {proof.margin:g}", excess)
    return Verdict("open", difference, f"{num_seeds} seeds cannot tell", excess)


def reason_to_stop(contender: Contender, known: Mapping[tuple[str, int], Outcome], proof: Proof) -> str | None:
    """Return why an arm is refuted on whatever seed and needs no more runs; None where it is not."""
    failed = next((o for (key, _), o in known.items() if key == contender.key and not o.is_ok), None)
    if failed is not None:
        return f"a run ended in {failed.kind}: {failed.message}"
    near = _nearest_to_overflow(contender, known)
    if near is not None and near.largest > proof.max_half:
        return (
            f"a half value reached {near.largest:,.0f} in module {near.module!r}: too near to the end of FP16, 65,504"
        )
    return None


def _nearest_to_overflow(contender: Contender, known: Mapping[tuple[str, int], Outcome]) -> Headroom | None:
    found = [o.headroom for (key, _), o in known.items() if key == contender.key and o.headroom is not None]
    return max(found, key=lambda headroom: headroom.largest, default=None)


def _loss_excess(losses: Sequence[tuple[float, float]], proof: Proof) -> Interval:
    """Return the paired excess of the loss over FP32's, relative to the size of FP32's mean."""
    scale = max(abs(statistics.fmean(fp32 for _, fp32 in losses)), 1e-3)
    return interval([(own - fp32) / scale for own, fp32 in losses], alpha=proof.alpha_per_look)
