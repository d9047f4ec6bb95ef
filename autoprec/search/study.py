"""The study: its trials and records, kept in Optuna's own storage and rebuilt from it."""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import optuna
from optuna.exceptions import UpdateFinishedTrialError
from optuna.storages import BaseStorage
from optuna.study import Study, StudyDirection
from optuna.trial import FrozenTrial, Trial, TrialState, create_trial
from pydantic import ValidationError

from autoprec.errors import PolicyError, StudyError, UsageError
from autoprec.policy import Policy
from autoprec.search.arms import FP32, Arm
from autoprec.search.database_urls import sqlite_path
from autoprec.search.fingerprint import Identity, first_difference
from autoprec.search.parameters import Parameters, ParameterValue
from autoprec.search.policy_sampler import PolicySampler
from autoprec.search.presence import HOLDER, Presence
from autoprec.search.scoring import OBJECTIVES, Limits, constraint_values, objective_values
from autoprec.search.storage import opened
from autoprec.search.trial_history import CACHED_FROM, FAILED_UNIT
from autoprec.trials.outcome import Outcome

__all__ = [
    "TrialRecord",
    "SearchStudy",
    "is_finished",
    "load_or_create",
    "open_study",
    "read_record",
    "stored_identity",
]

IDENTITY = "autoprec:identity"
EXHAUSTED = "autoprec:exhausted"
INTERRUPTED = "interrupted"
"""User attribute of a failed trial: its process ended it in good order."""


@dataclass(frozen=True)
class TrialRecord:
    """One finished trial as the study keeps it.

    `arm` names a baseline or warm start; "" for a sampled policy. `holder` marks the process that ran it.
    """

    number: int
    arm: str
    key: str
    policy: Policy
    outcome: Outcome
    is_feasible: bool
    is_cached: bool
    holder: str = ""

    @cached_property
    def label(self) -> str:
        return self.arm or f"trial {self.number}"


class SearchStudy:
    """A view of one Optuna study in the words of the search. All its state is the study's; records are parsed once."""

    def __init__(
        self,
        study: Study,
        storage: BaseStorage,
        parameters: Parameters,
        limits: Limits,
        pinned: Mapping[str, ParameterValue] | None = None,
        presence: Presence | None = None,
    ) -> None:
        self.study = study
        self.pinned = dict(pinned or {})
        self.parameters = parameters
        self.limits = limits
        self.presence = presence
        self._storage = storage
        self._parsed: dict[int, TrialRecord] = {}
        self._read: list[FrozenTrial] | None = None

    def _trials(self, *states: TrialState) -> list[FrozenTrial]:
        """Return the trials in these states, all where none is named: as they were at the last turn or change here."""
        if self._read is None:
            self._read = self.study.get_trials(deepcopy=False)
        return [trial for trial in self._read if not states or trial.state in states]

    @property
    def records(self) -> list[TrialRecord]:
        """All finished trials in order, those answered from an equal policy included."""
        finished = [trial for trial in self._trials() if is_finished(trial)]
        for trial in finished:
            if trial.number not in self._parsed:
                self._parsed[trial.number] = read_record(trial)
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

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Keep other processes from taking a trial meanwhile: what is running now is then known."""
        with contextlib.nullcontext() if self.presence is None else self.presence.turn():
            self._read = None
            yield

    def ask(self, values: Mapping[str, ParameterValue] | None = None, *, arm: Arm | None = None) -> Trial:
        """Ask for a trial with `values`, or for an arm's; without either the sampler says which.

        Call it in turn. Parameters, policy and holder are written at once: 54 parameters cost a database no more than
        one. Optuna's own samplers need a trial to sample for, whose parameters are then written one by one.
        """
        sampler = self.study.sampler
        values = arm.values if arm is not None else values
        if values is None and isinstance(sampler, PolicySampler) and not self._is_waited_for():
            values = sampler.suggest(self.study, self.parameters.distributions)
        if values is None:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="Heartbeat of storage")  # this study beats by itself
                trial = self.study.ask(fixed_distributions=dict(self.parameters.distributions))
            for name, value in self._marks(self.parameters.policy(trial.params)).items():
                trial.set_user_attr(name, value)
        else:
            policy = self.parameters.policy(values) if arm is None else arm.policy
            template = create_trial(
                state=TrialState.RUNNING,
                params={name: values[name] for name in self.parameters.distributions},
                distributions=dict(self.parameters.distributions),
                user_attrs={**({} if arm is None else {"arm": arm.name}), **self._marks(policy)},
            )
            study_id = self._storage.get_study_id_from_name(self.study.study_name)
            trial = Trial(self.study, self._storage.create_new_trial(study_id, template))
        if self.presence is not None:
            self.presence.begin(trial._trial_id)
        self._read = None
        return trial

    def _is_waited_for(self) -> bool:
        """Whether somebody enqueued a trial by Optuna's own means."""
        return bool(self._trials(TrialState.WAITING))

    def _marks(self, policy: Policy) -> dict[str, Any]:
        about = self._about(policy)
        return about if self.presence is None else {**about, HOLDER: self.presence.mark}

    def _about(self, policy: Policy) -> dict[str, Any]:
        return {
            "policy": policy.model_dump(mode="json", exclude_none=True),
            "policy_key": self.parameters.key(policy),
        }

    def tell(
        self, trial: Trial, policy: Policy, outcome: Outcome, *, cached_from: int | None = None
    ) -> TrialRecord | None:
        """Store an outcome with its constraints, and its objective values unless it was aborted: then it is pruned.

        Return None where others took this process for gone and failed the trial: its policy is theirs to run.
        """
        try:
            return self._tell(trial, policy, outcome, cached_from)
        except UpdateFinishedTrialError:
            return None
        finally:
            self._read = None
            if self.presence is not None:
                self.presence.end(trial._trial_id)

    def _tell(self, trial: Trial, policy: Policy, outcome: Outcome, cached_from: int | None) -> TrialRecord:
        reference = None if trial.user_attrs.get("arm") == FP32 else self.fp32
        fp32 = outcome if reference is None else reference.outcome
        known = trial.user_attrs
        for name, value in self._about(policy).items():
            if name not in known:
                trial.set_user_attr(name, value)
        if cached_from is not None:
            trial.set_user_attr(CACHED_FROM, cached_from)
        failed = self.parameters.owner_of(outcome.first_non_finite.module) if outcome.first_non_finite else None
        if failed is not None and self._blames(outcome, is_arm="arm" in known):
            trial.set_user_attr(FAILED_UNIT, failed)
        for name, value in self._constraints(outcome, fp32).items():
            trial.set_constraint(name, value)
        trial.set_user_attr("outcome", outcome.model_dump(mode="json"))  # the last: see `reconcile`
        return read_record(self._close(trial.number, outcome, fp32))

    def _constraints(self, outcome: Outcome, fp32: Outcome) -> dict[str, float]:
        values = constraint_values(outcome, fp32, self.limits)
        return {n: v for n, v in values.items() if n != "skip_rate" or self.parameters.has_grad_scaler}

    def _close(self, number: int, outcome: Outcome, fp32: Outcome) -> FrozenTrial:
        if outcome.kind == "aborted":
            return self.study.tell(number, state=TrialState.PRUNED)
        return self.study.tell(number, objective_values(outcome, fp32))

    def _blames(self, outcome: Outcome, *, is_arm: bool) -> bool:
        """Whether the first place that was not finite is why a trial ended; an arm may skip for its scale alone."""
        if outcome.kind == "aborted":
            return outcome.skip_rate > self.limits.max_skip_rate and not is_arm
        return not outcome.is_ok

    def fail(self, trial: Trial | FrozenTrial, *, is_lost: bool = False) -> None:
        """Store that a trial did not finish; it counts for nothing and its policy may be run again.

        One that was interrupted says so; one that is lost without a word may have ended its process itself.
        """
        with contextlib.suppress(UpdateFinishedTrialError):
            if not is_lost:
                self._storage.set_trial_user_attr(trial._trial_id, INTERRUPTED, True)
            self.study.tell(trial.number, state=TrialState.FAIL, skip_if_finished=True)
        self._read = None
        if self.presence is not None:
            self.presence.end(trial._trial_id)

    def equal_to(self, key: str) -> TrialRecord | None:
        """Return the trial that was run with an equal policy; None where none was."""
        return next((record for record in self.records if record.key == key and not record.is_cached), None)

    def settle(self, trial: Trial, policy: Policy, *, is_lost: bool = False) -> bool:
        """End a trial that was asked for and not run: answer it from an equal one, else fail it and return False."""
        equal = self.equal_to(self.parameters.key(policy))
        if equal is None:
            self.fail(trial, is_lost=is_lost)
            return False
        self.tell(trial, policy, equal.outcome, cached_from=equal.number)
        return True

    def reap(self) -> int:
        """Settle the RUNNING trials whose processes are gone, and return how many have to run again. Call it in turn.

        One whose outcome was stored is finished, one that equals a finished trial is answered from that. The others
        are failed, and their policies run again.
        """
        if self.presence is None:
            return 0
        num_failed = len(self._failed())
        running = self._trials(TrialState.RUNNING)
        lost = [trial for trial in running if self.presence.is_lost(trial)]
        for trial in lost:
            self._settle_lost(trial)
        self.presence.fail_stale([trial for trial in running if trial not in lost])
        self._read = None
        return len(self._failed()) - num_failed

    def _settle_lost(self, trial: FrozenTrial) -> None:
        outcome = trial.user_attrs.get("outcome")
        if outcome is not None:
            reference = None if trial.user_attrs.get("arm") == FP32 else self.fp32
            fp32 = Outcome(**outcome) if reference is None else reference.outcome
            self._close(trial.number, Outcome(**outcome), fp32)
        elif set(trial.params) == set(self.parameters.distributions) and not trial.user_attrs.get("arm"):
            left = Trial(self.study, trial._trial_id)
            self.settle(left, self.parameters.policy(trial.params), is_lost=True)
        else:
            self.fail(trial, is_lost=True)

    def _failed(self) -> list[FrozenTrial]:
        return self._trials(TrialState.FAIL)

    def elsewhere(self) -> dict[str, str]:
        """Return key -> arm ("" for a sampled policy) of what other processes run now, as far as is known."""
        if self.presence is None:
            return {}
        running = self._trials(TrialState.RUNNING)
        marked = [trial for trial in running if "policy_key" in trial.user_attrs]  # others are only being asked for
        others = [trial for trial in marked if not self.presence.is_mine(trial)]
        return {trial.user_attrs["policy_key"]: trial.user_attrs.get("arm", "") for trial in others}

    def running_arms(self) -> set[str]:
        """Return the names of the arms that run now, here or elsewhere."""
        return {trial.user_attrs["arm"] for trial in self._trials(TrialState.RUNNING) if "arm" in trial.user_attrs}

    def num_lost(self, key: str) -> int:
        """Return how many workers ended without a word while they ran a policy."""
        lost = [trial.user_attrs for trial in self._failed() if INTERRUPTED not in trial.user_attrs]
        return sum(a.get("policy_key") == key and a.get(HOLDER, {}).get("role") == "worker" for a in lost)

    def interrupted_values(self) -> tuple[list[dict[str, ParameterValue]], bool]:
        """Return the values of sampled trials that did not finish and have not been run again since, nor are now.

        And whether none of those that were asked for together was told, so that some may not have been asked for.
        """
        settled = {record.key for record in self.records} | set(self.elsewhere())
        lost: dict[str, FrozenTrial] = {}
        for trial in self._failed():
            if not trial.user_attrs.get("arm") and set(trial.params) == set(self.parameters.distributions):
                key = self.parameters.key(self.parameters.policy(trial.params))
                if key not in settled:
                    lost.setdefault(key, trial)
        complete = self._trials(TrialState.COMPLETE, TrialState.PRUNED)
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
    storage: BaseStorage,
    *,
    name: str,
    identity: Identity,
    sampler: optuna.samplers.BaseSampler,
    parameters: Parameters,
    limits: Limits,
    pinned: Mapping[str, ParameterValue] | None = None,
    presence: Presence | None = None,
) -> SearchStudy:
    """Open the study of a search, as `load_or_create`.

    Parameters in `pinned` keep their value in all that is drawn; the baselines and warm starts have their own.
    Without a `presence` this process is the only one on the study.
    """
    study = load_or_create(storage, name=name, identity=identity, sampler=sampler)
    return SearchStudy(study, storage, parameters, limits, pinned, presence)


def load_or_create(
    storage: BaseStorage,
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


def stored_identity(url: str, name: str) -> Identity | None:
    """Return the identity of the study of that name in the database at `url`; None where either is not there.

    Raises:
        UsageError, StudyError: as `opened`.
    """
    path = sqlite_path(url)
    if path is not None and not Path(path).exists():
        return None  # opening would make it
    with opened(url) as storage:
        known = {study.study_name: study.user_attrs for study in storage.get_all_studies()}
        found: Identity | None = known.get(name, {}).get(IDENTITY)
        return found


def _name_objectives(study: Study) -> None:
    """Give the objectives their names. Optuna calls this experimental; the warning is no news to a user."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        study.set_metric_names(list(OBJECTIVES))


def is_finished(trial: FrozenTrial) -> bool:
    return trial.state in (TrialState.COMPLETE, TrialState.PRUNED) and "outcome" in trial.user_attrs


def read_record(trial: FrozenTrial) -> TrialRecord:
    """Return a finished trial as a record.

    Raises:
        StudyError: somebody else has written into it, or another autoprec.
    """
    attributes: Mapping[str, Any] = trial.user_attrs
    try:
        return TrialRecord(
            number=trial.number,
            arm=attributes.get("arm", ""),
            key=attributes["policy_key"],
            policy=Policy(**attributes["policy"]),
            outcome=Outcome(**attributes["outcome"]),
            is_feasible=trial.state == TrialState.COMPLETE and all(value <= 0 for value in trial.constraints.values()),
            is_cached=CACHED_FROM in attributes,
            holder=attributes.get(HOLDER, {}).get("id", ""),
        )
    except (ValidationError, PolicyError, KeyError, TypeError, AttributeError) as error:
        named = error.errors()[0]["loc"] if isinstance(error, ValidationError) else ()
        place = ".".join(["outcome", *map(str, named)]) if named else str(error).splitlines()[0][:200]
        raise StudyError(
            f"trial {trial.number} of the study: {place} is not of this autoprec; give another --study-name, or delete"
            " the study"
        ) from None


def _has_our_directions(directions: Sequence[StudyDirection]) -> bool:
    return [direction.name.lower() for direction in directions] == list(OBJECTIVES.values())
