"""The proof: arms trained pairwise with FP32 on unused seeds, longer than a trial, against a margin fixed before."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Literal

from optuna.study import Study

from autoprec.errors import UsageError
from autoprec.policy import Policy
from autoprec.search.arms import AUTOCAST_BF16, AUTOCAST_FP16, FP32
from autoprec.search.events import Events
from autoprec.search.lookahead import Measure, measure_ahead
from autoprec.search.ratios import Ratios, paired_ratios
from autoprec.search.statistics import Interval, interval, num_values_needed
from autoprec.trials.outcome import Headroom, Outcome, TrialSettings

__all__ = [
    "Proof",
    "Verdict",
    "Verification",
    "MIN_GAIN",
    "better_but_open",
    "Contender",
    "RunStore",
    "build_proof",
    "verify",
]

VerdictKind = Literal["reference", "proved", "refuted", "open"]
MIN_GAIN = 0.01
"""Differences in memory or throughput below this share are no reason to leave the simpler policy."""
RUN_PREFIX = "autoprec:verification:"
FIRST_SEED = 1_000
"""Distance between the seed of the trials and the first seed of the proof: no trial used these."""
FIRST_LOOK = 4
PERTURBATION = 2.0**-11
"""The largest relative error of rounding to FP16; start weights moved by it show how far equal trainings part."""


@dataclass(frozen=True, slots=True)
class Proof:
    """The plan of a proof; part of the study's identity, so that it is fixed before the first trial.

    Attributes:
        margin: how much worse than FP32 the metric may be, in its own units.
        looks: numbers of seeds after which the verdicts are taken; each has an equal share of `alpha` (Bonferroni).
        num_steps: steps of each run, the learning rate falling to zero.
        alpha: chance that an arm which is worse than the margin is called proved, over all looks together.
        loss_margin: how far the held-out loss may lie above FP32's, relative to it, before that alone refutes an arm.
        max_half: largest half value that a forward pass may reach; beyond it an arm is refuted, since longer training
            and other data reach further. A quarter of FP16's largest number.
        first_seed: distance between the seed of the trials and the first seed of the proof.
    """

    margin: float = 0.05
    looks: tuple[int, ...] = (4, 8)
    num_steps: int = 40
    alpha: float = 0.05
    loss_margin: float = 0.25
    max_half: float = 65504.0 / 4
    first_seed: int = FIRST_SEED

    def __post_init__(self) -> None:
        if not 0 < self.margin < float("inf"):
            raise UsageError(f"margin is {self.margin}; a positive number in units of the metric is needed")

    @property
    def max_seeds(self) -> int:
        return self.looks[-1]

    @property
    def alpha_per_look(self) -> float:
        return self.alpha / len(self.looks)

    def settings(self, trial: TrialSettings, index: int) -> TrialSettings:
        """Return how the run on unused seed number `index` is made."""
        return trial.model_copy(
            update={
                "seed": trial.seed + self.first_seed + index,
                "measured_steps": max(1, self.num_steps - trial.warmup_steps),
                "anneal": True,
                "watch_headroom": True,
            }
        )


def build_proof(
    margin: float | None = None,
    max_seeds: int | None = None,
    *,
    num_steps: int | None = None,
    first_seed: int = FIRST_SEED,
) -> Proof:
    """Return a proof whose looks are after 4 seeds, at each doubling and after `max_seeds`; None keeps the defaults.

    Raises:
        UsageError: fewer than 2 seeds, which have no spread.
    """
    if max_seeds is not None and max_seeds < 2:
        raise UsageError(f"max_seeds is {max_seeds}; a proof needs at least 2")
    plain = Proof()
    last = plain.max_seeds if max_seeds is None else max_seeds
    doublings = [FIRST_LOOK * 2**k for k in range(last.bit_length()) if FIRST_LOOK * 2**k < last]
    return Proof(
        margin=plain.margin if margin is None else margin,
        looks=(*doublings, last),
        num_steps=plain.num_steps if num_steps is None else num_steps,
        first_seed=first_seed,
    )


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
        difference: of the metric to FP32's; None after a failed run.
        loss_excess: of the held-out loss over FP32's, relative to FP32's mean.
    """

    kind: VerdictKind
    difference: Interval | None
    reason: str
    loss_excess: Interval | None = None

    @property
    def is_safe(self) -> bool:
        return self.kind in ("reference", "proved")


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
        """The smallest margin that this proof could have proved for an arm that equals FP32; None without a pair."""
        widths = [v.difference.half_width for v in self.verdicts.values() if v.difference and v.kind != "reference"]
        return max(widths, default=None)

    @property
    def num_seeds_needed(self) -> int | None:
        """Seeds with which an arm that equals FP32 would be proved under the noise seen; None where that is unknown."""
        if self.noise is None:
            return None
        return num_values_needed(self.noise, self.proof.margin, alpha=self.proof.alpha_per_look)

    def ratios(self, name: str) -> Ratios:
        """Return an arm's memory and throughput over FP32's, from the pairs of the proof; nothing for FP32 itself."""
        if name == FP32:
            return Ratios()
        num_arms = max(1, sum(bool(runs) for runs in self.outcomes.values()) - 1)
        return paired_ratios(self.outcomes.get(name, {}), self.outcomes.get(FP32, {}), num_arms=num_arms)


class RunStore:
    """The runs of a proof, kept as user attributes of the search's study: they are no trials and teach no sampler."""

    def __init__(self, study: Study) -> None:
        self.study = study

    def outcomes(self) -> dict[tuple[str, int], Outcome]:
        """Return (policy key, seed index) -> outcome."""
        stored = [value for name, value in self.study.user_attrs.items() if name.startswith(RUN_PREFIX)]
        return {(run["policy_key"], run["seed_index"]): Outcome(**run["outcome"]) for run in stored}

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
        for look, num_seeds in enumerate(proof.looks):
            wanted = set(better_but_open(order, verdicts)) if look else {c.name for c in stage}
            still_open = [c for c in stage if c is reference or c.name in wanted]
            if look and len(still_open) == 1:
                break
            progress.run(still_open, num_seeds, reference)
            for contender in still_open:
                verdicts[contender.name] = judge(contender, reference, progress.known, num_seeds, proof, resolution)
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
        """Run each contender on the first `num_seeds` seeds, in turns; one that failed is not run again."""
        needed = [(c, index) for index in range(num_seeds) for c in _rotated(contenders, index, reference)]
        num_done = sum((c.key, index) in self.known for c, index in needed)
        self._events.verification_planned(len(needed), num_done, self._proof.num_steps)
        missing = (pair for pair in needed if (pair[0].key, pair[1]) not in self.known)
        jobs = (
            ((contender, index), contender.policy, self._settings(contender, index))
            for contender, index in missing
            if not _has_failed(contender, self.known)
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
) -> Verdict:
    """Judge one arm on the first `num_seeds` seeds."""
    if contender is reference:
        return Verdict("reference", None, "the reference of the comparison")
    failed = _has_failed(contender, known)
    if failed is not None:
        return Verdict("refuted", None, f"a run ended in {failed.kind}: {failed.message}"[:500])
    near = _nearest_to_overflow(contender, known)
    if near is not None and near.largest > proof.max_half:
        reason = (
            f"a half value reached {near.largest:,.0f} in module {near.module!r}: too near to the end of FP16, 65,504"
        )
        return Verdict("refuted", None, reason[:500])
    differences, losses = [], []
    for index in range(num_seeds):
        own, fp32 = known.get((contender.key, index)), known.get((reference.key, index))
        if own is None or fp32 is None or own.accuracy is None or fp32.accuracy is None:
            return Verdict("open", None, f"FP32 gave no number on seed {index}")
        differences.append(own.accuracy.value - fp32.accuracy.value)
        if own.eval_loss is not None and fp32.eval_loss is not None:
            losses.append((own.eval_loss.value, fp32.eval_loss.value))
    difference = interval(differences, alpha=proof.alpha_per_look, resolution=resolution)
    excess = _loss_excess(losses, proof) if len(losses) == num_seeds else None
    if difference.high < -proof.margin:
        return Verdict("refuted", difference, f"worse than FP32 by more than {proof.margin:g}", excess)
    if excess is not None and excess.low > proof.loss_margin:
        reason = f"held-out loss above FP32's by more than {proof.loss_margin:.0%}"
        return Verdict("refuted", difference, reason, excess)
    if difference.low > -proof.margin:
        return Verdict("proved", difference, f"not worse than FP32 by more than {proof.margin:g}", excess)
    return Verdict("open", difference, f"{num_seeds} seeds cannot tell", excess)


def _nearest_to_overflow(contender: Contender, known: Mapping[tuple[str, int], Outcome]) -> Headroom | None:
    found = [o.headroom for (key, _), o in known.items() if key == contender.key and o.headroom is not None]
    return max(found, key=lambda headroom: headroom.largest, default=None)


def _loss_excess(losses: Sequence[tuple[float, float]], proof: Proof) -> Interval:
    """Return the paired excess of the loss over FP32's, relative to the size of FP32's mean."""
    scale = max(abs(statistics.fmean(fp32 for _, fp32 in losses)), 1e-3)
    return interval([(own - fp32) / scale for own, fp32 in losses], alpha=proof.alpha_per_look)


def _has_failed(contender: Contender, known: Mapping[tuple[str, int], Outcome]) -> Outcome | None:
    return next((o for (key, _), o in known.items() if key == contender.key and not o.is_ok), None)


def _rotated(contenders: Sequence[Contender], index: int, reference: Contender) -> list[Contender]:
    """Return FP32 first, then the others starting at another one for each seed, so that drift falls on none."""
    others = [c for c in contenders if c is not reference]
    shift = index % len(others) if others else 0
    return [reference, *others[shift:], *others[:shift]]
