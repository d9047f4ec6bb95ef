"""The proof: arms trained pairwise with FP32 on unused seeds, longer than a trial, against a margin fixed before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Literal

from optuna.study import Study

from autoprec.policy import Policy
from autoprec.search.arms import AUTOCAST_BF16, AUTOCAST_FP16, FP32
from autoprec.search.events import Events
from autoprec.search.lookahead import Measure, measure_ahead
from autoprec.search.statistics import Interval, interval
from autoprec.trials.outcome import Outcome, TrialSettings

__all__ = ["Proof", "Verdict", "Verification", "MIN_GAIN", "better_but_open", "Contender", "RunStore", "verify"]

VerdictKind = Literal["reference", "proved", "refuted", "open"]
MIN_GAIN = 0.01
"""Differences in memory or throughput below this share are no reason to leave the simpler policy."""
RUN_PREFIX = "autoprec:verification:"
FIRST_SEED = 1_000
"""Distance between the seed of the trials and the first seed of the proof: no trial used these."""


@dataclass(frozen=True, slots=True)
class Proof:
    """The plan of a proof; part of the study's identity, so that it is fixed before the first trial.

    Attributes:
        margin: how much worse than FP32 the metric may be, in its own units.
        looks: numbers of seeds after which the verdicts are taken; each look has an equal share of `alpha`.
        num_steps: steps of each run, the learning rate falling to zero.
        alpha: chance that an arm which is worse than the margin is called proved.
    """

    margin: float = 0.05
    looks: tuple[int, ...] = (4, 8)
    num_steps: int = 40
    alpha: float = 0.05

    @property
    def max_seeds(self) -> int:
        return self.looks[-1]

    def settings(self, trial: TrialSettings, index: int) -> TrialSettings:
        """Return how the run on unused seed number `index` is made."""
        return trial.model_copy(
            update={
                "seed": trial.seed + FIRST_SEED + index,
                "measured_steps": self.num_steps - trial.warmup_steps,
                "anneal": True,
            }
        )


@dataclass(frozen=True, slots=True)
class Contender:
    """An arm of the proof: a baseline or a finalist."""

    name: str
    policy: Policy
    key: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the proof says of one arm. `difference` is the metric minus FP32's, None after a failed run."""

    kind: VerdictKind
    difference: Interval | None
    reason: str

    @property
    def is_safe(self) -> bool:
        return self.kind in ("reference", "proved")


@dataclass(frozen=True)
class Verification:
    """Verdicts and runs of a proof. `outcomes[arm]` maps the seed's index to the outcome."""

    proof: Proof
    verdicts: Mapping[str, Verdict] = field(default_factory=dict)
    outcomes: Mapping[str, Mapping[int, Outcome]] = field(default_factory=dict)

    @property
    def num_seeds(self) -> int:
        return max((len(runs) for runs in self.outcomes.values()), default=0)

    @property
    def provable_margin(self) -> float | None:
        """The smallest margin that this proof could have proved for an arm that equals FP32; None without a pair."""
        widths = [v.difference.half_width for v in self.verdicts.values() if v.difference and v.kind != "reference"]
        return max(widths, default=None)


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
    gains: Mapping[str, float],
    resolution: float,
    events: Events,
) -> Verification:
    """Train the contenders, FP32 among them, until the best that is proved is known or the seeds are used up.

    All contenders of a stage are trained to the first look; after it only open ones that would be better than what is
    proved, by at least `MIN_GAIN` in `gains` (name -> what it saves against FP32). Runs that the store holds are not
    made again.
    """
    known = store.outcomes()
    verdicts: dict[str, Verdict] = {}
    reference = next(c for c in contenders if c.name == FP32)
    for stage in _stages(contenders, gains):
        if verdicts.get(AUTOCAST_BF16, _NOT_RUN).is_safe and {c.name for c in stage} == {FP32, AUTOCAST_FP16}:
            break
        for look, num_seeds in enumerate(proof.looks):
            wanted = set(better_but_open(gains, verdicts)) if look else {c.name for c in stage}
            still_open = [c for c in stage if c is reference or c.name in wanted]
            if look and len(still_open) == 1:
                break
            needed = [(c, index) for index in range(num_seeds) for c in _rotated(still_open, index, reference)]
            num_done = sum((c.key, index) in known for c, index in needed)
            events.verification_planned(len(needed), num_done, proof.num_steps)
            missing = (pair for pair in needed if (pair[0].key, pair[1]) not in known)
            jobs = (
                ((contender, index), contender.policy, proof.settings(trial_settings, index))
                for contender, index in missing
                if not _has_failed(contender, known)
            )
            with closing(measure_ahead(measure, jobs)) as results:
                for (contender, index), outcome in results:
                    store.add(contender, index, outcome)
                    known[contender.key, index] = outcome
                    events.verification_finished(contender.name, index, outcome)
            for contender in still_open:
                verdicts[contender.name] = judge(contender, reference, known, num_seeds, proof, resolution)
    runs = {c.name: {index: o for (key, index), o in sorted(known.items()) if key == c.key} for c in contenders}
    return Verification(proof, verdicts, runs)


_NOT_RUN = Verdict("open", None, "not run")


def _stages(contenders: Sequence[Contender], gains: Mapping[str, float]) -> list[list[Contender]]:
    """Return which arms are trained first, and which only where those are not proved; FP32 is in each.

    Autocast FP16 waits where BF16, which needs no grad scaler, saves as much.
    """
    low, simpler = gains.get(AUTOCAST_FP16), gains.get(AUTOCAST_BF16)
    if low is None or simpler is None or 1 + low >= (1 + simpler) * (1 + MIN_GAIN):
        return [list(contenders)]
    spare = [c for c in contenders if c.name in (FP32, AUTOCAST_FP16)]
    return [[c for c in contenders if c.name != AUTOCAST_FP16], spare]


def better_but_open(gains: Mapping[str, float], verdicts: Mapping[str, Verdict]) -> list[str]:
    """Return the open arms that would be recommended if they were proved, the best first."""
    safe = max((gain for name, gain in gains.items() if name in verdicts and verdicts[name].is_safe), default=0.0)
    better = [name for name, gain in gains.items() if 1 + gain >= (1 + safe) * (1 + MIN_GAIN)]
    return sorted((n for n in better if n not in verdicts or verdicts[n].kind == "open"), key=lambda n: -gains[n])


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
    differences = []
    for index in range(num_seeds):
        pair = known.get((contender.key, index)), known.get((reference.key, index))
        if pair[0] is None or pair[1] is None or pair[0].accuracy is None or pair[1].accuracy is None:
            return Verdict("open", None, f"FP32 gave no number on seed {index}")
        differences.append(pair[0].accuracy.value - pair[1].accuracy.value)
    difference = interval(differences, alpha=proof.alpha / len(proof.looks), resolution=resolution)
    if difference.low > -proof.margin:
        return Verdict("proved", difference, f"not worse than FP32 by more than {proof.margin:g}")
    if difference.high < -proof.margin:
        return Verdict("refuted", difference, f"worse than FP32 by more than {proof.margin:g}")
    return Verdict("open", difference, f"{num_seeds} seeds cannot tell")


def _has_failed(contender: Contender, known: Mapping[tuple[str, int], Outcome]) -> Outcome | None:
    return next((o for (key, _), o in known.items() if key == contender.key and not o.is_ok), None)


def _rotated(contenders: Sequence[Contender], index: int, reference: Contender) -> list[Contender]:
    """Return FP32 first, then the others starting at another one for each seed, so that drift falls on none."""
    others = [c for c in contenders if c is not reference]
    shift = index % len(others) if others else 0
    return [reference, *others[shift:], *others[:shift]]
