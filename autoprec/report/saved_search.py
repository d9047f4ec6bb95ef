"""What a search left behind, read for people: its files and all trials of its study, however they ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import optuna
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState
from pydantic import ValidationError

from autoprec.errors import StudyError, UsageError
from autoprec.policy import Policy, Precision, load_policy, resolve_precisions
from autoprec.profiling.profile import Profile
from autoprec.search.arms import FP32
from autoprec.search.front import Front, Member, read_front
from autoprec.search.names import prefixes_of
from autoprec.search.samplers import quiet_optuna
from autoprec.search.storage import open_storage, sqlite_url
from autoprec.search.trial_history import CACHED_FROM
from autoprec.search.verification import RunStore
from autoprec.trials.outcome import Outcome

__all__ = ["SavedSearch", "SavedTrial", "load_search"]

UNFINISHED = {TrialState.FAIL: "stopped", TrialState.RUNNING: "running", TrialState.WAITING: "waiting"}
"""Kinds of end of trials without an outcome."""


@dataclass(frozen=True, slots=True)
class SavedTrial:
    """One trial. `outcome` and `policy` are None for one that was stopped; `same_as` is the trial that answered it."""

    number: int
    arm: str
    end: str
    is_feasible: bool
    same_as: int | None = None
    policy: Policy | None = None
    outcome: Outcome | None = None

    @property
    def label(self) -> str:
        return self.arm or f"trial {self.number}"

    @property
    def was_run(self) -> bool:
        return self.outcome is not None and self.same_as is None


@dataclass(frozen=True)
class SavedSearch:
    """Attributes:
    folder: where the files are.
    study: the Optuna study.
    policy: what policy.json holds.
    profile: None where the search took none.
    trials: all of them, in order.
    runs: arm of the proof -> index of the seed -> outcome, FP32 first.
    """

    folder: Path
    study: Study
    front: Front
    policy: Policy
    profile: Profile | None
    trials: Sequence[SavedTrial]
    runs: Mapping[str, Mapping[int, Outcome]]

    @cached_property
    def outcomes(self) -> dict[str, Outcome]:
        """The trial of each member of the front, or the first run of its proof where it had none."""
        found = {trial.number: trial.outcome for trial in self.trials if trial.was_run and trial.outcome is not None}
        named = {
            m.name: (None if m.trial is None else found.get(m.trial))
            or next(iter(self.runs.get(m.name, {}).values()), None)
            for m in self.members
        }
        return {name: outcome for name, outcome in named.items() if outcome is not None}

    @property
    def members(self) -> Sequence[Member]:
        return self.front.front

    @cached_property
    def units(self) -> list[str]:
        """Names of the units, in the order of the profile (that of the calls), else of the policy's evidence."""
        if self.profile is not None and self.profile.units:
            return list(self.profile.units)
        return list(self.policy.evidence.units) if self.policy.evidence is not None else []

    def precisions(self, policy: Policy) -> dict[str, Precision]:
        """Return the precision of each unit under a policy."""
        names = {name: None for unit in self.units for name in prefixes_of(unit)}
        parents = {name: name.rpartition(".")[0] or None for name in names}
        found, _ = resolve_precisions(policy, parents)
        return {unit: found[unit] for unit in self.units}


def load_search(folder: Path, *, storage: str | None = None) -> SavedSearch:
    """Read the output folder of a search. Nothing is run or written.

    Args:
        storage: the database URL that the search was given; None takes `study.db` in the folder.

    Raises:
        UsageError: the folder is not that of a search that came as far as its baselines.
        PolicyError, StudyError: a file or the study in it cannot be read.
    """
    if not folder.is_dir():
        raise UsageError(f"{folder}: no such folder; the output folder of a search is needed")
    if not (folder / "front.json").is_file():
        raise UsageError(f"{folder}: holds no front.json; the output folder of a search that has ended is needed")
    front = read_front(folder / "front.json")
    study = _load_study(folder, front.study_name, storage)
    path = folder / "profile.json"
    try:
        return SavedSearch(
            folder=folder,
            study=study,
            front=front,
            policy=load_policy(folder / "policy.json"),
            profile=Profile.load(path) if path.exists() else None,
            trials=[_saved(trial) for trial in study.get_trials(deepcopy=False)],
            runs=_runs(study),
        )
    except ValidationError as error:
        place = ".".join(str(part) for part in error.errors()[0]["loc"])
        raise StudyError(f"study {front.study_name!r}: {place} is not of this autoprec") from None


def _load_study(folder: Path, name: str, storage: str | None) -> Study:
    quiet_optuna()
    path = folder / "study.db"
    if storage is None and not path.is_file():
        raise UsageError(f"{folder}: holds no study.db; give the --storage that the search was given")
    try:
        return optuna.load_study(study_name=name, storage=open_storage(storage or sqlite_url(path)))
    except KeyError:
        raise StudyError(f"the storage holds no study {name!r}") from None


def _saved(trial: FrozenTrial) -> SavedTrial:
    attributes = trial.user_attrs
    arm = str(attributes.get("arm", ""))
    if trial.state != TrialState.COMPLETE or "outcome" not in attributes:
        return SavedTrial(trial.number, arm, UNFINISHED.get(trial.state, trial.state.name.lower()), False)
    outcome = Outcome.model_validate(attributes["outcome"])
    return SavedTrial(
        number=trial.number,
        arm=arm,
        end=outcome.kind,
        is_feasible=all(value <= 0 for value in trial.constraints.values()),
        same_as=attributes.get(CACHED_FROM),
        policy=Policy(**attributes["policy"]),
        outcome=outcome,
    )


def _runs(study: Study) -> dict[str, dict[int, Outcome]]:
    found: dict[str, dict[int, Outcome]] = {FP32: {}}
    runs = RunStore(study).runs()
    longest = max((run.num_steps for run in runs), default=0)  # the length that the verdicts are of
    for run in (run for run in runs if run.num_steps == longest):
        found.setdefault(run.arm, {})[run.seed_index] = run.outcome
    return {arm: dict(sorted(runs.items())) for arm, runs in found.items() if runs}
