"""The proof: arms trained pairwise with FP32 on unused seeds, longer than a trial, against a margin fixed before.

FP32 is trained first, alone: where it gains too little over its start weights for the margin to mean something, the
runs are made twice as long, until it does or the limits of the plan are reached. Then the arms join it.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace

from optuna.study import Study

from autoprec.probes.ranges import ExponentHistogram
from autoprec.search.arms import AUTOCAST_BF16, AUTOCAST_FP16, FP32
from autoprec.search.events import Events
from autoprec.search.judging import Contender, Verdict, better_but_open, is_indistinct, judge, reason_to_stop, told_end
from autoprec.search.lookahead import Measure, measure_ahead, num_parallel
from autoprec.search.metric import Metric
from autoprec.search.proof import Proof
from autoprec.search.ratios import Ratios, paired_ratios
from autoprec.search.sensitivity import Sensitivity, steps_needed, what_was_learned
from autoprec.search.shares import Shares
from autoprec.search.statistics import num_values_needed
from autoprec.trials.outcome import Outcome, TrialSettings

__all__ = ["RunStore", "StoredRun", "Verification", "verify"]

RUN_PREFIX = "autoprec:verification:"
PERTURBATION = 2.0**-11
"""The largest relative error of rounding to FP16; start weights moved by it show how far equal trainings part."""


@dataclass(frozen=True)
class Verification:
    """Verdicts and runs of a proof.

    Attributes:
        outcomes: arm -> index of the seed -> outcome, of the runs of `num_steps`.
        noise: standard deviation of the metric between FP32 and itself, started from weights that `PERTURBATION` moved;
            None where no arm was left open, so that it was not needed.
        metric: what the arms are compared by.
        history: what FP32 gained at each length that was tried, the one that the verdicts are of last.
        why_ended: why runs are missing (the proof's time); "" where none are.
    """

    proof: Proof
    verdicts: Mapping[str, Verdict] = field(default_factory=dict)
    outcomes: Mapping[str, Mapping[int, Outcome]] = field(default_factory=dict)
    noise: float | None = None
    metric: Metric = field(default_factory=Metric)
    history: Sequence[Sensitivity] = ()
    why_ended: str = ""

    @property
    def learned(self) -> Sensitivity | None:
        return self.history[-1] if self.history else None

    @property
    def num_steps(self) -> int:
        return self.proof.num_steps if self.learned is None else self.learned.num_steps

    @property
    def margin(self) -> float | None:
        """How much worse the metric may be, in its own units; None before FP32's gain is known."""
        if self.learned is None or self.learned.metric is None:
            return self.proof.margin
        return self.learned.metric.margin

    @property
    def end_gradients(self) -> ExponentHistogram | None:
        """All gradients at FP32's trained weights, over the seeds; None where they were not watched."""
        seen = [o.end_ranges.gradients for o in self.outcomes.get(FP32, {}).values() if o.end_ranges is not None]
        return functools.reduce(operator.add, seen) if seen else None

    @property
    def end_activation(self) -> tuple[float, str] | None:
        """The largest activation at FP32's trained weights, and its module."""
        seen = [o.end_ranges for o in self.outcomes.get(FP32, {}).values() if o.end_ranges is not None]
        return max(((s.largest_activation, s.module) for s in seen), default=None)

    @property
    def num_steps_needed(self) -> int | None:
        """Steps in which FP32's gain would probably show; None where that is not in sight."""
        return None if self.learned is None else self.learned.steps_needed

    @property
    def num_seeds(self) -> int:
        pairs = [v.difference.num_values for v in self.verdicts.values() if v.difference is not None]
        return max([*pairs, *(len(runs) for runs in self.outcomes.values())], default=0)

    @property
    def provable_margin(self) -> float | None:
        """The smallest margin that this proof could have proved for an arm that equals FP32; None without a pair.

        Of the arms that are not refuted, where there are such.
        """
        pairs = [(v.kind == "refuted", v.difference.half_width) for v in self.verdicts.values() if v.difference]
        return min(pairs, default=(False, None))[1]

    @property
    def num_seeds_needed(self) -> int | None:
        """Seeds with which an arm that equals FP32 would be proved under the noise seen; None where that is unknown."""
        if self.noise is None or not self.margin:
            return None
        return num_values_needed(self.noise, self.margin, alpha=self.proof.alpha_per_look * self.proof.arm_share)

    def ratios(self, name: str) -> Ratios:
        """Return an arm's memory and throughput over FP32's, from the pairs of the proof; nothing for FP32 itself."""
        if name == FP32:
            return Ratios()
        num_arms = max(1, sum(bool(runs) for runs in self.outcomes.values()) - 1)
        return paired_ratios(self.outcomes.get(name, {}), self.outcomes.get(FP32, {}), num_arms=num_arms)


@dataclass(frozen=True, slots=True)
class StoredRun:
    """One run of a proof as the study keeps it."""

    arm: str
    key: str
    seed_index: int
    num_steps: int
    outcome: Outcome


class RunStore:
    """The runs of a proof, kept as user attributes of the search's study: they are no trials and teach no sampler."""

    def __init__(self, study: Study) -> None:
        self.study = study

    def runs(self) -> list[StoredRun]:
        """Return all runs, in the order in which the storage gives them."""
        stored = [value for name, value in self.study.user_attrs.items() if name.startswith(RUN_PREFIX)]
        return [
            StoredRun(run["arm"], run["policy_key"], run["seed_index"], run["num_steps"], Outcome(**run["outcome"]))
            for run in stored
        ]

    def outcomes(self) -> dict[tuple[int, str, int], Outcome]:
        """Return (steps, policy key, seed index) -> outcome."""
        return {(run.num_steps, run.key, run.seed_index): run.outcome for run in self.runs()}

    def add(self, contender: Contender, index: int, num_steps: int, outcome: Outcome) -> None:
        run = {
            "arm": contender.name,
            "policy_key": contender.key,
            "policy": contender.policy.model_dump(mode="json", exclude_none=True),
            "seed_index": index,
            "num_steps": num_steps,
            "outcome": outcome.model_dump(mode="json"),
        }
        self.study.set_user_attr(f"{RUN_PREFIX}{contender.key}:{num_steps}:{index}", run)


def verify(
    contenders: Sequence[Contender],
    measure: Measure,
    *,
    proof: Proof,
    trial_settings: TrialSettings,
    store: RunStore,
    shares: Shares,
    order: Sequence[str],
    metric: Metric,
    events: Events,
    check_reference: Callable[[Outcome], None] | None = None,
    deadline: float | None = None,
    is_timed: bool = False,
    may_lengthen: bool = True,
) -> Verification:
    """Train the contenders, FP32 among them, until the best that is proved is known or the seeds are used up.

    FP32 decides how long the runs are; an arm is trained only at a length at which FP32's gain shows. Where there the
    metric of no arm differs from FP32's at all, the runs are made longer, too. All contenders of a stage are trained to
    the first look; after it only open ones that would be used if they were proved. Where such are left at the end, FP32
    is run against itself to tell noise from harm. Runs that the store holds are not made again.

    Args:
        shares: hands out the error; the arms in `order` are planned with it.
        order: names of the arms from the one that would be used first, FP32 among them; those after FP32, or not in it,
            get the first look alone.
        check_reference: is given each new outcome of FP32 and raises where nothing can be compared with it; None leaves
            the arms open.
        deadline: `time.monotonic()` after which no run begins; None for no end.
        is_timed: whether throughput is measured, so that FP32 has to run beside the arms.
        may_lengthen: whether runs in which no arm's metric differs from FP32's are made longer, too.
    """
    runs = _Runs(measure, proof, trial_settings, store, events, check_reference, deadline, is_timed)
    reference = next(c for c in contenders if c.name == FP32)
    stages = _stages(contenders, order)
    history = _lengthen(runs, reference, stages[0], metric=metric)
    while True:
        verdicts = {reference.name: Verdict("reference", None, "the reference of the comparison")}
        if not history[-1].is_shown:
            untold = _untold(runs, reference, history[-1])
            verdicts |= {c.name: untold for c in contenders if c is not reference}
            break
        verdicts |= _judged(runs, stages, reference, verdicts, shares=shares, order=order, metric=metric)
        longer = runs.num_steps * 2
        if not may_lengthen or longer > proof.max_steps or not _never_differs(runs, contenders, reference, metric):
            break
        if not runs.have_time(longer, len(stages[0])):
            break
        runs.num_steps = longer
        history = _lengthen(runs, reference, stages[0], metric=metric)
    if history[-1].is_shown and better_but_open(order, verdicts):
        runs.make([_perturbed(reference)], proof.looks[0], reference)
    outcomes = {c.name: runs.of(c) for c in contenders}
    return Verification(proof, verdicts, outcomes, _noise(runs, reference), metric, history, runs.why_ended)


def _judged(
    runs: _Runs,
    stages: Sequence[Sequence[Contender]],
    reference: Contender,
    verdicts: Mapping[str, Verdict],
    *,
    shares: Shares,
    order: Sequence[str],
    metric: Metric,
) -> dict[str, Verdict]:
    """Train the stages at the length of now until the best that is proved is known; return the verdicts."""
    found, proof = dict(verdicts), runs.proof
    for stage in stages:
        if len(found) > 1 and not {c.name for c in stage} & set(better_but_open(order, found)):
            break
        shares.plan(c.key for name in order for c in stage if c.name == name and c is not reference)
        for look, num_seeds in enumerate(proof.looks):
            wanted = set(better_but_open(order, found)) if look else {c.name for c in stage}
            still_open = [c for c in stage if c is reference or c.name in wanted]
            if look and len(still_open) == 1:
                break
            runs.make(still_open, num_seeds, reference)
            learned = runs.learned(reference, num_seeds, metric)
            turn = shares.in_turn(c.key for c in still_open)
            for contender in sorted(still_open, key=lambda c: turn.index(c.key)):
                level = shares.level(contender.key)
                verdict = judge(contender, reference, runs.known, num_seeds, proof, metric, learned, level=level)
                shares.settle(contender.key, verdict)
                found[contender.name] = verdict
    return found


def _never_differs(runs: _Runs, contenders: Sequence[Contender], reference: Contender, metric: Metric) -> bool:
    """Whether the metric of every arm hardly differs from FP32's on any seed: all predict one class.

    Such a metric tells nothing of any arm, whatever its gain over the start. One that is perfect cannot differ either,
    and longer runs would change nothing.
    """
    own = runs.of(reference)
    arms = [runs.of(c) for c in contenders if c is not reference]
    pairs = [(arm[index].accuracy, own[index].accuracy) for arm in arms for index in arm.keys() & own.keys()]
    values = [(first.value, second.value) for first, second in pairs if first is not None and second is not None]
    if metric.is_loss or not values or len(values) < len(pairs) or all(fp32 == 1.0 for _, fp32 in values):
        return False
    return is_indistinct(values, runs.learned(reference, len(own), metric))


def _lengthen(runs: _Runs, reference: Contender, stage: Sequence[Contender], *, metric: Metric) -> list[Sensitivity]:
    """Train FP32 on the seeds of the first look, each time twice as long, until its gain shows; return what it gained.

    Where time is measured the arms are trained beside it, in turns, so that drift of the machine falls on all alike;
    elsewhere alone, so that nothing is trained in vain.

    At the longest length the seeds of all looks are tried too: what is hidden by noise shows with more of them. Its
    gain decides alone, and never the arms': choosing a length where FP32 did well makes an arm harder to prove.
    """
    history: list[Sensitivity] = []
    lengths = list(runs.proof.lengths)
    begun = max((steps for steps in lengths if steps <= runs.num_steps or runs.holds(reference, steps)), default=0)
    beside = stage if runs.is_timed else [reference]
    for num_steps, longer in itertools.zip_longest(lengths, lengths[1:]):
        runs.num_steps = num_steps
        if num_steps < begun and runs.holds(reference, num_steps):  # an earlier round went on from here
            history.append(runs.learned(reference, runs.proof.looks[0], metric))
            continue
        runs.make(beside, runs.proof.looks[0], reference)
        history.append(runs.learned(reference, runs.proof.looks[0], metric))
        if history[-1].is_shown or runs.ended(reference) is not None:
            break
        if longer is None or not runs.have_time(longer, len(stage)):
            for num_seeds in runs.proof.looks[1:]:
                runs.make([reference], num_seeds, reference)
                history[-1] = runs.learned(reference, num_seeds, metric)
                if history[-1].is_shown:
                    break
            break
    if not history[-1].is_shown:
        history[-1] = replace(history[-1], steps_needed=steps_needed(history, runs.proof))
    return history


def _untold(runs: _Runs, reference: Contender, learned: Sensitivity) -> Verdict:
    """Return the verdict on every arm where FP32 gave nothing to compare it with, so that none was trained."""
    ended = runs.ended(reference)
    if ended is not None:
        return Verdict("open", None, f"FP32 itself {told_end(ended)}"[:500])
    if runs.why_ended:
        return Verdict("open", None, runs.why_ended)
    return Verdict("insensitive", None, f"FP32 itself learned too little in {learned.num_steps} steps for a margin")


class _Runs:
    """Makes the runs of one length that the store lacks, and keeps all of them. `num_steps` is the length of now."""

    def __init__(
        self,
        measure: Measure,
        proof: Proof,
        trial_settings: TrialSettings,
        store: RunStore,
        events: Events,
        check_reference: Callable[[Outcome], None] | None,
        deadline: float | None,
        is_timed: bool,
    ) -> None:
        self.is_timed = is_timed
        self.proof, self.num_steps, self.why_ended = proof, proof.num_steps, ""
        self._measure, self._trial_settings = measure, trial_settings
        self._store, self._events, self._check_reference = store, events, check_reference
        self._deadline = deadline
        self._all = store.outcomes()

    @property
    def known(self) -> dict[tuple[str, int], Outcome]:
        """(policy key, seed index) -> outcome, of the runs of this length."""
        return {(key, index): o for (steps, key, index), o in self._all.items() if steps == self.num_steps}

    def of(self, contender: Contender) -> dict[int, Outcome]:
        return {index: o for (key, index), o in sorted(self.known.items()) if key == contender.key}

    def holds(self, contender: Contender, num_steps: int) -> bool:
        """Whether any run of that length is there."""
        return any(steps == num_steps and key == contender.key for steps, key, _ in self._all)

    def ended(self, contender: Contender) -> Outcome | None:
        """Return a run that gave no numbers; None where all did."""
        return next((outcome for outcome in self.of(contender).values() if not outcome.is_ok), None)

    def learned(self, reference: Contender, num_seeds: int, metric: Metric) -> Sensitivity:
        """Return what FP32 gained on the first seeds."""
        runs = [outcome for index, outcome in self.of(reference).items() if index < num_seeds]
        return what_was_learned(runs, self.proof, metric, num_steps=self.num_steps)

    def have_time(self, num_steps: int, num_arms: int) -> bool:
        """Whether the first look of all arms at that length fits into the proof's time, by what its runs took so far.

        Counted in the seconds that the runs themselves took, which the store keeps, so that a search that goes on
        decides as one that was never stopped.
        """
        made = [(steps, outcome.wall_seconds) for (steps, _, _), outcome in self._all.items()]
        if any(steps == num_steps for steps, _ in made):
            return True
        if not made:
            return num_steps <= self.proof.max_steps
        spent = math.fsum(seconds for _, seconds in made) / num_parallel(self._measure)
        step = statistics.median(seconds / steps for steps, seconds in made)
        needed = step * num_steps * num_arms * self.proof.looks[0] / num_parallel(self._measure)
        left = math.inf if self._deadline is None else self._deadline - time.monotonic()
        return spent + needed <= self.proof.max_seconds and needed <= left

    def make(self, contenders: Sequence[Contender], num_seeds: int, reference: Contender) -> None:
        """Run each contender on the first `num_seeds` seeds, in turns; one that is out on any seed is not run again."""
        known, steps = self.known, self.num_steps
        needed = [(c, index) for index in range(num_seeds) for c in _rotated(contenders, index, reference)]
        num_done = sum((c.key, index) in known for c, index in needed)
        self._events.verification_planned(len(needed), num_done, steps)
        missing = (pair for pair in needed if (pair[0].key, pair[1]) not in known)
        jobs = (
            ((contender, index), contender.policy, self._settings(contender, index))
            for contender, index in missing
            if self._goes_on() and reason_to_stop(contender, self.known, self.proof) is None
        )
        with closing(measure_ahead(self._measure, jobs)) as results:
            for (contender, index), outcome in results:
                if self._check_reference is not None and contender.name == FP32:
                    self._check_reference(outcome)
                self._store.add(contender, index, steps, outcome)
                self._all[steps, contender.key, index] = outcome
                self._events.verification_finished(contender.name, index, outcome)

    def _goes_on(self) -> bool:
        if self._deadline is not None and time.monotonic() >= self._deadline:
            self.why_ended = "the time given is over"
        return not self.why_ended

    def _settings(self, contender: Contender, index: int) -> TrialSettings:
        settings = self.proof.settings(self._trial_settings, index, self.num_steps)
        is_reference = contender.name == FP32
        update = {
            "perturbation": contender.perturbation,
            "measure_start": is_reference,
            "watch_end": is_reference,
        }
        return settings.model_copy(update=update)


def _perturbed(reference: Contender) -> Contender:
    return Contender("fp32 again", reference.policy, f"{reference.key}:perturbed", PERTURBATION)


def _noise(runs: _Runs, reference: Contender) -> float | None:
    again, first = runs.of(_perturbed(reference)), runs.of(reference)
    differences = [
        again[index].accuracy.value - first[index].accuracy.value  # type: ignore[union-attr]
        for index in again.keys() & first.keys()
        if again[index].accuracy and first[index].accuracy
    ]
    return statistics.stdev(differences) if len(differences) > 1 else None


def _stages(contenders: Sequence[Contender], order: Sequence[str]) -> list[list[Contender]]:
    """Return which arms are trained first, and which only where those are not proved; FP32 is in each.

    Autocast FP16 waits where BF16, which needs no grad scaler, would be used before it.
    """
    names = [name for name in order if name in (AUTOCAST_BF16, AUTOCAST_FP16)]
    if names != [AUTOCAST_BF16, AUTOCAST_FP16]:
        return [list(contenders)]
    spare = [c for c in contenders if c.name in (FP32, AUTOCAST_FP16)]
    return [[c for c in contenders if c.name != AUTOCAST_FP16], spare]


def _rotated(contenders: Sequence[Contender], index: int, reference: Contender) -> list[Contender]:
    """Return FP32 first, then the others starting at another one for each seed, so that drift falls on none."""
    others = [c for c in contenders if c is not reference]
    shift = index % len(others) if others else 0
    return [reference, *others[shift:], *others[:shift]]
