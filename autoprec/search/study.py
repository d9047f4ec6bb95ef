"""The study: its objectives, constraints and records, kept in Optuna's own storage and rebuilt from it."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import optuna
from optuna.study import Study, StudyDirection
from optuna.trial import FrozenTrial, Trial, TrialState

from autoprec.errors import StudyError, UsageError
from autoprec.policy import Policy
from autoprec.search.arms import FP32
from autoprec.search.fingerprint import Identity, first_difference
from autoprec.search.parameters import Parameters, ParameterValue
from autoprec.search.trial_history import CACHED_FROM, FAILED_UNIT
from autoprec.trials.aborting import AbortRules, training_loss_gap
from autoprec.trials.outcome import Outcome

__all__ = ["OBJECTIVES", "Limits", "TrialRecord", "SearchStudy", "load_or_create", "open_study", "objective_values"]

OBJECTIVES: Mapping[str, Literal["minimize", "maximize"]] = {
    "peak_memory_bytes": "minimize",
    "throughput_samples_per_second": "maximize",
    "accuracy": "maximize",
}
IDENTITY = "autoprec:identity"
EXHAUSTED = "autoprec:exhausted"


@dataclass(frozen=True, slots=True)
class Limits:
    """When a trial's policy is feasible.

    `max_loss_gap` is the held-out loss above FP32's, relative to it; `max_skip_rate` the share of skipped steps.
    """

    max_loss_gap: float = 0.5
    max_skip_rate: float = 0.25

    def abort_rules(self, fp32: Outcome) -> AbortRules:
        """Return what ends a trial early: it cannot become feasible any more."""
        return AbortRules(
            max_skip_rate=self.max_skip_rate,
            max_loss_gap=self.max_loss_gap,
            reference_losses=tuple(fp32.train_losses),
        )


@dataclass(frozen=True)
class TrialRecord:
    """One finished trial as the study keeps it. `arm` names a baseline or warm start; "" for a sampled policy."""

    number: int
    arm: str
    key: str
    policy: Policy
    outcome: Outcome
    is_feasible: bool
    is_cached: bool

    @cached_property
    def label(self) -> str:
        return self.arm or f"trial {self.number}"


class SearchStudy:
    """A view of one Optuna study in the words of the search. All its state is the study's; records are parsed once."""

    def __init__(
        self, study: Study, parameters: Parameters, limits: Limits, pinned: Mapping[str, ParameterValue] | None = None
    ) -> None:
        self.study = study
        self.pinned = dict(pinned or {})
        self.parameters = parameters
        self.limits = limits
        self._parsed: dict[int, TrialRecord] = {}

    @property
    def records(self) -> list[TrialRecord]:
        """All finished trials in order, those answered from an equal policy included."""
        finished = [trial for trial in self.study.get_trials(deepcopy=False) if _is_finished(trial)]
        for trial in finished:
            if trial.number not in self._parsed:
                self._parsed[trial.number] = _record(trial)
        return [self._parsed[trial.number] for trial in finished]

    @property
    def num_finished(self) -> int:
        """Trials that were really run and finished: what `--n-trials` counts."""
        return sum(not record.is_cached for record in self.records)

    @property
    def fp32(self) -> TrialRecord | None:
        return next((record for record in self.records if record.arm == FP32), None)

    @property
    def is_exhausted(self) -> bool:
        return bool(self.study.user_attrs.get(EXHAUSTED, False))

    def mark_exhausted(self) -> None:
        self.study.set_user_attr(EXHAUSTED, True)

    def ask(self, values: Mapping[str, ParameterValue] | None = None, *, arm: str = "") -> Trial:
        """Ask for a trial with `values`, those of the arm called `arm` where it has a name; None asks the sampler."""
        if values is not None:
            self.study.enqueue_trial(dict(values), user_attrs={"arm": arm} if arm else {})
        return self.study.ask(fixed_distributions=dict(self.parameters.distributions))

    def tell(self, trial: Trial, policy: Policy, outcome: Outcome, *, cached_from: int | None = None) -> TrialRecord:
        """Store an outcome with its constraints, and its objective values unless it was aborted: then it is pruned."""
        reference = None if trial.user_attrs.get("arm") == FP32 else self.fp32
        fp32 = outcome if reference is None else reference.outcome
        trial.set_user_attr("policy", policy.model_dump(mode="json", exclude_none=True))
        trial.set_user_attr("policy_key", self.parameters.key(policy))
        if cached_from is not None:
            trial.set_user_attr(CACHED_FROM, cached_from)
        failed = self.parameters.owner_of(outcome.first_non_finite.module) if outcome.first_non_finite else None
        if failed is not None and self._blames(outcome, is_arm="arm" in trial.user_attrs):
            trial.set_user_attr(FAILED_UNIT, failed)
        for name, value in constraint_values(outcome, fp32, self.limits).items():
            trial.set_constraint(name, value)
        trial.set_user_attr("outcome", outcome.model_dump(mode="json"))  # the last: see `reconcile`
        return _record(self._close(trial.number, outcome, fp32))

    def _close(self, number: int, outcome: Outcome, fp32: Outcome) -> FrozenTrial:
        if outcome.kind == "aborted":
            return self.study.tell(number, state=TrialState.PRUNED)
        return self.study.tell(number, objective_values(outcome, fp32))

    def _blames(self, outcome: Outcome, *, is_arm: bool) -> bool:
        """Whether the first place that was not finite is why a trial ended; an arm may skip for its scale alone."""
        if outcome.kind == "aborted":
            return outcome.skip_rate > self.limits.max_skip_rate and not is_arm
        return not outcome.is_ok

    def fail(self, trial: Trial | FrozenTrial) -> None:
        """Store that a trial did not finish; it counts for nothing and its policy may be run again."""
        self.study.tell(trial.number, state=TrialState.FAIL, skip_if_finished=True)

    def equal_to(self, key: str) -> TrialRecord | None:
        """Return the trial that was run with an equal policy; None where none was."""
        return next((record for record in self.records if record.key == key and not record.is_cached), None)

    def settle(self, trial: Trial, policy: Policy) -> bool:
        """End a trial that was asked for and not run: answer it from an equal one, else fail it and return False."""
        equal = self.equal_to(self.parameters.key(policy))
        if equal is None:
            self.fail(trial)
            return False
        self.tell(trial, policy, equal.outcome, cached_from=equal.number)
        return True

    def reconcile(self) -> int:
        """Settle the trials that a killed search left RUNNING; nobody else may run the study.

        One whose outcome was stored is finished, one that equals a finished trial is answered from that. The others
        are failed, their number is returned, and their policies run again.
        """
        num_failed = 0
        for trial in self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            outcome = trial.user_attrs.get("outcome")
            if outcome is not None:
                reference = None if trial.user_attrs.get("arm") == FP32 else self.fp32
                fp32 = Outcome(**outcome) if reference is None else reference.outcome
                self._close(trial.number, Outcome(**outcome), fp32)
            elif set(trial.params) == set(self.parameters.distributions) and not trial.user_attrs.get("arm"):
                left = Trial(self.study, trial._trial_id)
                num_failed += not self.settle(left, self.parameters.policy(trial.params))
            else:
                self.fail(trial)
                num_failed += 1
        return num_failed

    def interrupted_values(self) -> tuple[list[dict[str, ParameterValue]], bool]:
        """Return the values of sampled trials that were running when a search was stopped and not run again since.

        And whether none of those that were asked for together was told, so that some may not have been asked for.
        """
        finished = {record.key for record in self.records}
        failed = self.study.get_trials(deepcopy=False, states=(TrialState.FAIL,))
        lost: dict[str, FrozenTrial] = {}
        for trial in failed:
            if not trial.user_attrs.get("arm") and set(trial.params) == set(self.parameters.distributions):
                key = self.parameters.key(self.parameters.policy(trial.params))
                if key not in finished:
                    lost.setdefault(key, trial)
        complete = self.study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.PRUNED))
        told = max((t.datetime_complete for t in complete if t.datetime_complete is not None), default=None)
        started = min((t.datetime_start for t in lost.values() if t.datetime_start is not None), default=None)
        is_untold = started is not None and (told is None or told <= started)
        return [dict(trial.params) for trial in lost.values()], is_untold

    @property
    def num_cached_last(self) -> int:
        """How many trials in a row, up to the last, were answered from equal ones."""
        return sum(1 for _ in itertools.takewhile(lambda record: record.is_cached, reversed(self.records)))

    def front(self) -> list[TrialRecord]:
        """Return the feasible trials that no other feasible trial beats on all three objectives."""
        best = {trial.number for trial in self.study.best_trials}
        return [record for record in self.records if record.number in best and not record.is_cached]


def open_study(
    storage: optuna.storages.BaseStorage,
    *,
    name: str,
    identity: Identity,
    sampler: optuna.samplers.BaseSampler,
    parameters: Parameters,
    limits: Limits,
    pinned: Mapping[str, ParameterValue] | None = None,
) -> SearchStudy:
    """Open the study of a search, as `load_or_create`.

    Parameters in `pinned` keep their value in all that is drawn; the baselines and warm starts have their own.
    """
    study = load_or_create(storage, name=name, identity=identity, sampler=sampler)
    return SearchStudy(study, parameters, limits, pinned)


def load_or_create(
    storage: optuna.storages.BaseStorage,
    *,
    name: str,
    identity: Identity,
    sampler: optuna.samplers.BaseSampler | None = None,
) -> Study:
    """Create the study, or load the one of that name where its identity is the same.

    Raises:
        UsageError: a study of that name has other settings; the first that differs is named.
        StudyError: a study of that name was not made by autoprec.
    """
    study = optuna.create_study(
        study_name=name, storage=storage, sampler=sampler, directions=list(OBJECTIVES.values()), load_if_exists=True
    )
    stored = study.user_attrs.get(IDENTITY)
    if stored is None:
        if study.get_trials(deepcopy=False) or not _has_our_directions(study.directions):
            raise StudyError(f"study {name!r} exists and was not made by autoprec; give another --study-name")
        _name_objectives(study)
        study.set_user_attr(IDENTITY, identity)
    else:
        difference = first_difference(stored, identity)
        if difference is not None:
            raise UsageError(
                f"study {name!r} has other settings: {difference}; give another --study-name (or none, and other "
                "settings are another study by themselves), or the settings that it was begun with"
            )
    return study


def _name_objectives(study: Study) -> None:
    """Give the objectives their names. Optuna calls this experimental; the warning is no news to a user."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        study.set_metric_names(list(OBJECTIVES))


def constraint_values(outcome: Outcome, fp32: Outcome, limits: Limits) -> dict[str, float]:
    """Return the constraints, feasible where <= 0: finiteness, skipped steps, held-out loss above FP32's.

    Of an aborted trial the loss is the training's, and absent where it had not come far enough to tell.
    """
    if outcome.kind == "aborted":
        known = training_loss_gap(outcome.train_losses, fp32.train_losses)
        skips = {"finite": -1.0, "skip_rate": outcome.skip_rate - limits.max_skip_rate}
        return skips if skips["skip_rate"] > 0 or known is None else {**skips, "loss_gap": known - limits.max_loss_gap}
    gap = 1.0
    if outcome.is_ok and outcome.eval_loss is not None and fp32.eval_loss is not None:
        reference = fp32.eval_loss.value
        gap = (outcome.eval_loss.value - reference) / max(abs(reference), 1e-3)
    return {
        "finite": -1.0 if outcome.is_ok else 1.0,
        "skip_rate": outcome.skip_rate - limits.max_skip_rate,
        "loss_gap": (gap if outcome.is_ok else max(gap, 1.0)) - limits.max_loss_gap,
    }


def objective_values(outcome: Outcome, fp32: Outcome) -> list[float]:
    """Return the objectives; where an outcome has none, the finite worst case, so that the sampler learns from it.

    The worst case is twice FP32's memory, no throughput, and an accuracy of 0, or below FP32's by its own size
    where the metric can be negative.
    """
    memory, throughput, accuracy = (
        outcome.peak_memory_bytes,
        outcome.throughput_samples_per_second,
        outcome.accuracy,
    )
    fp32_memory = fp32.peak_memory_bytes.value if fp32.peak_memory_bytes else 0.0
    fp32_accuracy = fp32.accuracy.value if fp32.accuracy else 0.0
    worst = 0.0 if 0.0 <= fp32_accuracy <= 1.0 else fp32_accuracy - max(1.0, abs(fp32_accuracy))
    if not outcome.is_ok:
        return [2 * fp32_memory, 0.0, worst]
    return [
        memory.value if memory else 2 * fp32_memory,
        throughput.value if throughput else 0.0,
        accuracy.value if accuracy else worst,
    ]


def _is_finished(trial: FrozenTrial) -> bool:
    return trial.state in (TrialState.COMPLETE, TrialState.PRUNED) and "outcome" in trial.user_attrs


def _record(trial: FrozenTrial) -> TrialRecord:
    attributes: Mapping[str, Any] = trial.user_attrs
    return TrialRecord(
        number=trial.number,
        arm=attributes.get("arm", ""),
        key=attributes["policy_key"],
        policy=Policy(**attributes["policy"]),
        outcome=Outcome(**attributes["outcome"]),
        is_feasible=trial.state == TrialState.COMPLETE and all(value <= 0 for value in trial.constraints.values()),
        is_cached=CACHED_FROM in attributes,
    )


def _has_our_directions(directions: Sequence[StudyDirection]) -> bool:
    return [direction.name.lower() for direction in directions] == list(OBJECTIVES.values())
