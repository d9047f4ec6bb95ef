"""The proof: arms trained pairwise with FP32 on unused seeds, longer than a trial, against a margin fixed before."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field

from optuna.study import Study

from autoprec.search.arms import AUTOCAST_BF16, AUTOCAST_FP16, FP32
from autoprec.search.events import Events
from autoprec.search.judging import Contender, Verdict, better_but_open, judge, reason_to_stop
from autoprec.search.lookahead import Measure, measure_ahead
from autoprec.search.proof import Proof
from autoprec.search.ratios import Ratios, paired_ratios
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
        outcomes: arm -> index of the seed -> outcome.
        noise: standard deviation of the metric between FP32 and itself, started from weights that `PERTURBATION` moved;
            None where no arm was left open, so that it was not needed.
    """

    proof: Proof
    verdicts: Mapping[str, Verdict] = field(default_factory=dict)
    outcomes: Mapping[str, Mapping[int, Outcome]] = field(default_factory=dict)
    noise: float | None = None

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
        if self.noise is None:
            return None
        return num_values_needed(self.noise, self.proof.margin, alpha=self.proof.alpha_per_look * self.proof.arm_share)

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
    outcome: Outcome


class RunStore:
    """The runs of a proof, kept as user attributes of the search's study: they are no trials and teach no sampler."""

    def __init__(self, study: Study) -> None:
        self.study = study

    def runs(self) -> list[StoredRun]:
        """Return all runs, in the order in which the storage gives them."""
        stored = [value for name, value in self.study.user_attrs.items() if name.startswith(RUN_PREFIX)]
        return [
            StoredRun(run["arm"], run["policy_key"], run["seed_index"], Outcome(**run["outcome"])) for run in stored
        ]

    def outcomes(self) -> dict[tuple[str, int], Outcome]:
        """Return (policy key, seed index) -> outcome."""
        return {(run.key, run.seed_index): run.outcome for run in self.runs()}

    def add(self, contender: Contender, index: int, outcome: Outcome) -> None:
        run = {
            "arm": contender.name,
            "policy_key": contender.key,
            "policy": contender.policy.model_dump(mode="json", exclude_none=True),
            "seed_index": index,
            "outcome": outcome.model_dump(mode="json"),
        }
        self.study.set_user_attr(f"{RUN_PREFIX}{contender.key}:{index}", run)


def verify(
    contenders: Sequence[Contender],
    measure: Measure,
    *,
    proof: Proof,
    trial_settings: TrialSettings,
    store: RunStore,
    shares: Shares,
    order: Sequence[str],
    resolution: float,
    events: Events,
    check_reference: Callable[[Outcome], None] | None = None,
) -> Verification:
    """Train the contenders, FP32 among them, until the best that is proved is known or the seeds are used up.

    All contenders of a stage are trained to the first look; after it only open ones that would be used if they were
    proved. Where such are left at the end, FP32 is run against itself to tell noise from harm. Runs that the store
    holds are not made again.

    Args:
        shares: hands out the error; the arms in `order` are planned with it.
        order: names of the arms from the one that would be used first, FP32 among them; those after FP32, or not in it,
            get the first look alone.
        check_reference: is given each new outcome of FP32 and raises where nothing can be compared with it; None leaves
            the arms open.
    """
    progress = _Progress(measure, proof, trial_settings, store, events, check_reference)
    verdicts: dict[str, Verdict] = {}
    reference = next(c for c in contenders if c.name == FP32)
    for stage in _stages(contenders, order):
        if verdicts and not {c.name for c in stage} & set(better_but_open(order, verdicts)):
            break
        shares.plan(c.key for name in order for c in stage if c.name == name and c is not reference)
        for look, num_seeds in enumerate(proof.looks):
            wanted = set(better_but_open(order, verdicts)) if look else {c.name for c in stage}
            still_open = [c for c in stage if c is reference or c.name in wanted]
            if look and len(still_open) == 1:
                break
            progress.run(still_open, num_seeds, reference)
            turn = shares.in_turn(c.key for c in still_open)
            for contender in sorted(still_open, key=lambda c: turn.index(c.key)):
                level = shares.level(contender.key)
                verdict = judge(contender, reference, progress.known, num_seeds, proof, resolution, level=level)
                shares.settle(contender.key, verdict)
                verdicts[contender.name] = verdict
    if better_but_open(order, verdicts):
        progress.run([_perturbed(reference)], proof.looks[0], reference)
    runs = {c.name: progress.of(c) for c in contenders}
    return Verification(proof, verdicts, runs, _noise(progress, reference))


class _Progress:
    """Makes the runs that the store lacks and keeps all of them."""

    def __init__(
        self,
        measure: Measure,
        proof: Proof,
        trial_settings: TrialSettings,
        store: RunStore,
        events: Events,
        check_reference: Callable[[Outcome], None] | None,
    ) -> None:
        self._measure, self._proof, self._trial_settings = measure, proof, trial_settings
        self._store, self._events, self._check_reference = store, events, check_reference
        self.known = store.outcomes()

    def of(self, contender: Contender) -> dict[int, Outcome]:
        return {index: o for (key, index), o in sorted(self.known.items()) if key == contender.key}

    def run(self, contenders: Sequence[Contender], num_seeds: int, reference: Contender) -> None:
        """Run each contender on the first `num_seeds` seeds, in turns; one that is out on any seed is not run again."""
        needed = [(c, index) for index in range(num_seeds) for c in _rotated(contenders, index, reference)]
        num_done = sum((c.key, index) in self.known for c, index in needed)
        self._events.verification_planned(len(needed), num_done, self._proof.num_steps)
        missing = (pair for pair in needed if (pair[0].key, pair[1]) not in self.known)
        jobs = (
            ((contender, index), contender.policy, self._settings(contender, index))
            for contender, index in missing
            if reason_to_stop(contender, self.known, self._proof) is None
        )
        with closing(measure_ahead(self._measure, jobs)) as results:
            for (contender, index), outcome in results:
                if self._check_reference is not None and contender.name == FP32:
                    self._check_reference(outcome)
                self._store.add(contender, index, outcome)
                self.known[contender.key, index] = outcome
                self._events.verification_finished(contender.name, index, outcome)

    def _settings(self, contender: Contender, index: int) -> TrialSettings:
        settings = self._proof.settings(self._trial_settings, index)
        return settings.model_copy(update={"perturbation": contender.perturbation})


def _perturbed(reference: Contender) -> Contender:
    return Contender("fp32 again", reference.policy, f"{reference.key}:perturbed", PERTURBATION)


def _noise(progress: _Progress, reference: Contender) -> float | None:
    again, first = progress.of(_perturbed(reference)), progress.of(reference)
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
