"""front.json: the whole front, the arms of the proof and the picks, from which a choice can be made again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from autoprec.errors import PolicyError, UsageError, in_one_line
from autoprec.policy import Number, Policy
from autoprec.policy.evidence import FrozenModel
from autoprec.policy.strict_json import MAX_FILE_BYTES, parse_strict_json
from autoprec.search.arms import AUTOCAST_BF16, FP32
from autoprec.search.judging import Verdict, VerdictKind
from autoprec.search.metric import Metric
from autoprec.search.proof import Proof
from autoprec.search.ratios import Ratios
from autoprec.search.recommendation import Choice, choose
from autoprec.search.scoring import OBJECTIVES
from autoprec.search.sensitivity import Gain, Sensitivity
from autoprec.search.statistics import Interval
from autoprec.search.verification import Verification
from autoprec.search.worth import PREFERENCES, Candidate, Prefer, Worth
from autoprec.trials.outcome import EndKind, Outcome

__all__ = ["Front", "LargestBatch", "Member", "build_front", "read_front"]

OF_TRIAL = ("peak_memory_bytes", "throughput_samples_per_second", "throughput_tokens_per_second")
NUMBERS = (*OF_TRIAL, "accuracy", "eval_loss")
"""What a member's numbers may hold: of its trial (tokens a second where the task counts them), then of the proof."""


class PairedDifference(FrozenModel):
    """Mean over paired seeds and the one-sided half-width at the level at which the arm could be proved."""

    num_seeds: int
    mean: float
    half_width: float


class MemberProof(FrozenModel):
    """The verdict on one arm; the differences are to FP32, that of the loss relative to FP32's mean."""

    verdict: VerdictKind
    reason: str = ""
    accuracy_difference: PairedDifference | None = None
    loss_excess: PairedDifference | None = None
    margin: float | None = None
    skip_rate: float = 0.0


class LargestBatch(FrozenModel):
    """The largest batch whose peak is within the memory budget, at the target's input size; 0: not even one sample.

    The peak is computed ("predicted" where it was measured at the target's batch and is scaled from there), the
    throughput predicted.
    """

    batch_size: int
    peak_memory_bytes: Number | None = None
    throughput_samples_per_second: Number | None = None


class Member(FrozenModel):
    """One policy with its numbers: memory and throughput of the trial, accuracy and loss of the proof.

    What a short trial said of accuracy stands in `trial_accuracy` alone: it is another experiment.

    `ratios` are memory and throughput over FP32's, with an interval where they were measured in pairs.
    """

    name: str = Field(max_length=500)
    trial: int | None = None
    on_front: bool = False
    outcome: EndKind = "ok"
    numbers: dict[str, Number] = Field(default_factory=dict)
    ratios: dict[str, Number] = Field(default_factory=dict)
    trial_accuracy: Number | None = None
    launch_share: float | None = None
    proof: MemberProof | None = None
    largest_batch: LargestBatch | None = None
    policy: Policy


class FrontProof(FrozenModel):
    """How the proof was made, what FP32 learned in it, and its noise.

    `margin` is absolute, in units of the metric; None where it is `max_lost_share` of what FP32 gained.
    """

    margin: float | None = None
    max_lost_share: float = 0.1
    loss_margin: float
    looks: list[int]
    num_steps: int
    metric: str = "accuracy"
    higher_is_better: bool = True
    learned: PairedDifference | None = None
    start: float = 0.0
    is_sensitive: bool | None = None
    num_steps_needed: int | None = None
    alpha: float
    arm_share: float = 1.0
    num_seeds: int
    provable_margin: float | None = None
    noise: float | None = None


class Front(FrozenModel):
    """The content of front.json. `picks` name what would be recommended for each preference, without a budget."""

    schema_version: Literal[1] = 1
    study_name: str
    task: str
    objectives: dict[str, str]
    target: str
    target_is_here: bool
    target_memory_bytes: float | None = None
    target_gpu: str = ""
    min_gain: float = 0.03
    min_gain_with_scaler: float = 0.05
    present: str = AUTOCAST_BF16
    is_quick: bool = False
    recommended: str
    sentence: str
    prefer: Prefer
    picks: dict[str, str]
    memory_budget_bytes: float | None = None
    proof: FrontProof
    front: list[Member]

    def to_json(self) -> str:
        return self.model_dump_json(indent=2, exclude_none=True) + "\n"

    def choose(self, *, prefer: Prefer, memory_budget_bytes: float | None = None) -> Choice:
        """Choose again among what was tried and proved; nothing is run."""
        return choose(
            [_candidate(member) for member in self.front],
            self._verification(),
            prefer=prefer,
            target=self.target,
            target_is_here=self.target_is_here,
            worth=Worth(
                min_gain=self.min_gain,
                min_gain_with_scaler=self.min_gain_with_scaler,
                capacity_bytes=self.target_memory_bytes,
                gpu=self.target_gpu,
                present=self.present,
            ),
            memory_budget_bytes=memory_budget_bytes,
            is_quick=self.is_quick,
        )

    @property
    def margin(self) -> float | None:
        """How much worse than FP32 the metric may be, in its units; None where FP32's gain is not known."""
        return self._verification().margin

    @property
    def metric(self) -> Metric:
        return Metric(self.proof.metric, self.proof.higher_is_better)

    def _verification(self) -> Verification:
        proof = Proof(
            margin=self.proof.margin,
            max_lost_share=self.proof.max_lost_share,
            looks=tuple(self.proof.looks),
            num_steps=self.proof.num_steps,
            alpha=self.proof.alpha,
            arm_share=self.proof.arm_share,
            loss_margin=self.proof.loss_margin,
        )
        verdicts = {member.name: _verdict(member.proof) for member in self.front if member.proof is not None}
        return Verification(proof, verdicts, noise=self.proof.noise, metric=self.metric, history=self._history())

    def _history(self) -> list[Sensitivity]:
        found, learned = self.proof, _read(self.proof.learned)
        if learned is None:
            return []
        share = found.max_lost_share * max(0.0, learned.mean)
        margin = share if found.margin is None else found.margin
        gain = Gain(learned, found.start, margin, bool(found.is_sensitive))
        return [Sensitivity(found.num_steps, gain, steps_needed=found.num_steps_needed)]


def build_front(
    candidates: Sequence[Candidate],
    verification: Verification,
    choice: Choice,
    *,
    study_name: str,
    task: str,
    target: str,
    target_is_here: bool,
    trials: Mapping[str, int],
    on_front: frozenset[str],
    means: Mapping[str, Mapping[str, Number]],
    worth: Worth,
    is_quick: bool = False,
    memory_budget_bytes: float | None = None,
    largest: Mapping[str, LargestBatch] | None = None,
) -> Front:
    """Collect the content of front.json.

    Args:
        candidates: the arms of the proof, then what else is on the front; FP32 first.
        trials: name -> number of the trial.
        on_front: names of the policies that no other beats.
        means: name -> accuracy and loss over the seeds of the proof, the former under the metric's own sign.
        worth, is_quick: as `choose` was given them.
        largest: name -> the largest batch in the budget, where there is one.
    """
    reference = next(c for c in candidates if c.name == FP32)
    picks = {
        prefer: choose(
            candidates,
            verification,
            prefer=prefer,
            target=target,
            target_is_here=target_is_here,
            worth=worth,
            is_quick=is_quick,
        )
        for prefer in PREFERENCES
    }
    return Front(
        study_name=study_name,
        task=task,
        objectives=dict(OBJECTIVES),
        target=target,
        target_is_here=target_is_here,
        target_memory_bytes=worth.capacity_bytes,
        target_gpu=worth.gpu,
        min_gain=worth.min_gain,
        min_gain_with_scaler=worth.min_gain_with_scaler,
        present=worth.present,
        is_quick=is_quick,
        recommended=choice.name,
        sentence=choice.sentence,
        prefer=choice.prefer,
        picks={prefer: pick.name for prefer, pick in picks.items() if pick.kind != "inconclusive"},
        memory_budget_bytes=memory_budget_bytes,
        proof=_front_proof(verification),
        front=[
            Member(
                name=c.name,
                trial=trials.get(c.trial or c.name),
                on_front=(c.trial or c.name) in on_front,
                outcome=c.outcome.kind,
                numbers=_numbers(c.outcome) | dict(means.get(c.name, {})),
                ratios=_named(c.ratios(reference)),
                trial_accuracy=_trial_accuracy(c, trials, verification.metric),
                launch_share=c.outcome.launch_share,
                proof=_member_proof(verification.verdicts.get(c.name)),
                largest_batch=None if largest is None else largest.get(c.name),
                policy=c.policy,
            )
            for c in candidates
        ],
    )


def _front_proof(verification: Verification) -> FrontProof:
    proof, learned = verification.proof, verification.learned
    gain = None if learned is None else learned.metric
    return FrontProof(
        margin=proof.margin,
        max_lost_share=proof.max_lost_share,
        loss_margin=proof.loss_margin,
        looks=list(proof.looks),
        num_steps=verification.num_steps,
        metric=verification.metric.name,
        higher_is_better=verification.metric.higher_is_better,
        learned=None if gain is None else _written(gain.interval),
        start=0.0 if gain is None else gain.start,
        is_sensitive=None if learned is None else learned.is_shown,
        num_steps_needed=verification.num_steps_needed,
        alpha=proof.alpha,
        arm_share=proof.arm_share,
        num_seeds=verification.num_seeds,
        provable_margin=verification.provable_margin,
        noise=verification.noise,
    )


def read_front(path: Path, *, data: bytes | None = None) -> Front:
    """Read a front.json, or its `data` where that has been read. Reading runs nothing.

    Raises:
        UsageError: no such file.
        PolicyError: not a front.
    """
    try:
        if data is None:
            with path.open("rb") as file:
                data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise UsageError(f"{path.name}: cannot be read ({error.strerror or error})") from None
    parsed = parse_strict_json(data, where=path.name)
    try:
        front = Front.model_validate(parsed)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(in_one_line, first["loc"])) or "file"
        raise PolicyError(f"{path.name}: {place}: {first['msg']}; not the front of this autoprec") from None
    if not any(member.name == FP32 for member in front.front):
        raise PolicyError(f"{path.name}: front: no member is called {FP32!r}, with which all is compared")
    return front


def _numbers(outcome: Outcome) -> dict[str, Number]:
    found: dict[str, Number | None] = {name: getattr(outcome, name) for name in OF_TRIAL}
    return {name: number for name, number in found.items() if number is not None}


def _trial_accuracy(candidate: Candidate, trials: Mapping[str, int], metric: Metric) -> Number | None:
    found = candidate.outcome.accuracy
    return None if found is None or (candidate.trial or candidate.name) not in trials else metric.own(found)


def _named(ratios: Ratios) -> dict[str, Number]:
    named = {"peak_memory_bytes": ratios.memory, "throughput_samples_per_second": ratios.throughput}
    return {name: ratio for name, ratio in named.items() if ratio is not None}


def _member_proof(verdict: Verdict | None) -> MemberProof | None:
    if verdict is None:
        return None
    return MemberProof(
        verdict=verdict.kind,
        reason=verdict.reason,
        accuracy_difference=_written(verdict.difference),
        loss_excess=_written(verdict.loss_excess),
        margin=verdict.margin,
        skip_rate=verdict.skip_rate,
    )


def _written(found: Interval | None) -> PairedDifference | None:
    if found is None:
        return None
    return PairedDifference(num_seeds=found.num_values, mean=found.mean, half_width=found.half_width)


def _read(found: PairedDifference | None) -> Interval | None:
    return None if found is None else Interval(found.num_seeds, found.mean, found.half_width)


def _verdict(proof: MemberProof) -> Verdict:
    difference, excess = _read(proof.accuracy_difference), _read(proof.loss_excess)
    return Verdict(proof.verdict, difference, proof.reason, excess, proof.margin, proof.skip_rate)


def _candidate(member: Member) -> Candidate:
    fields: dict[str, Any] = {name: number for name, number in member.numbers.items() if name in OF_TRIAL}
    fields["launch_share"] = member.launch_share
    ratios = Ratios(member.ratios.get("peak_memory_bytes"), member.ratios.get("throughput_samples_per_second"))
    return Candidate(member.name, member.policy, member.name, Outcome(kind=member.outcome, **fields), ratios)
