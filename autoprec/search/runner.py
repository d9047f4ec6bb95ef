"""The loop of a search: the arms first, then the sampler's policies, each equal policy run once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from optuna.trial import Trial

from autoprec.errors import StudyError, TaskError
from autoprec.policy import Policy
from autoprec.search.arms import FP32, Arm
from autoprec.search.events import Events
from autoprec.search.parameters import ParameterValue
from autoprec.search.study import SearchStudy, TrialRecord
from autoprec.trials.outcome import Outcome, TrialSettings

__all__ = ["Measure", "run_trials"]

Measure = Callable[[Policy, TrialSettings], Outcome]
"""Run one trial. Never raises for a policy that diverges or is impossible."""

MAX_REPEATS = 8
"""Equal policies in a row, answered from the study without a run, after which a new policy is looked for at random."""
MAX_DRAWS = 500
"""Random policies that must all have been run before, for the space to count as exhausted."""


def run_trials(
    study: SearchStudy,
    measure: Measure,
    *,
    arms: Sequence[Arm],
    n_trials: int,
    settings: TrialSettings,
    events: Events,
) -> None:
    """Run trials until the study holds `n_trials` finished ones; baselines always run.

    Raises:
        TaskError, StudyError: FP32 itself does not train, so that nothing can be compared.
    """
    run = _Runner(study, measure, n_trials=n_trials, settings=settings, events=events)
    done = {record.arm for record in study.records}
    for arm in arms:
        if arm.name not in done and (arm.is_baseline or study.num_finished < n_trials):
            run.arm(arm)
    repeats = 0
    while study.num_finished < n_trials and not study.is_exhausted:
        values = _unseen_values(study, seed=settings.seed) if repeats >= MAX_REPEATS else None
        if repeats >= MAX_REPEATS and values is None:
            study.mark_exhausted()
            events.note(f"the search space is exhausted: {MAX_DRAWS} random policies were all run before")
        else:
            repeats = repeats + 1 if run.sample(values).is_cached else 0


class _Runner:
    """Runs one trial at a time: ask, look for an equal one, measure, tell."""

    def __init__(
        self, study: SearchStudy, measure: Measure, *, n_trials: int, settings: TrialSettings, events: Events
    ) -> None:
        self._study = study
        self._measure = measure
        self._n_trials = n_trials
        self._settings = settings
        self._events = events

    def arm(self, arm: Arm) -> TrialRecord:
        """Run a baseline or warm start; FP32's failure stops the search."""
        check = _require_reference if arm.name == FP32 else None
        return self._run(self._study.ask(arm.values, arm=arm.name), arm.policy, arm.name, check)

    def sample(self, values: Mapping[str, ParameterValue] | None) -> TrialRecord:
        """Run the given values, or what the sampler asks for."""
        trial = self._study.ask(values)
        return self._run(trial, self._study.parameters.policy(trial.params), "sampled", None)

    def _run(self, trial: Trial, policy: Policy, label: str, check: Callable[[Outcome], None] | None) -> TrialRecord:
        try:
            equal = _equal_record(self._study, policy)
            if equal is not None:
                return self._study.tell(trial, policy, equal.outcome, cached_from=equal.number)
            self._events.trial_started(trial.number, label, policy)
            outcome = self._measure(policy, self._settings)
            if check is not None:
                check(outcome)
            record = self._study.tell(trial, policy, outcome)
        except BaseException:
            self._study.fail(trial)
            raise
        num_finished = self._study.num_finished
        self._events.trial_finished(record, num_finished=num_finished, n_trials=self._n_trials)
        return record


def _unseen_values(study: SearchStudy, *, seed: int) -> dict[str, ParameterValue] | None:
    """Draw values whose policy was not run yet; None where many draws find none."""
    known = {record.key for record in study.records}
    parameters = study.parameters
    rng = np.random.default_rng([seed, len(study.records)])
    for _ in range(MAX_DRAWS):
        values = parameters.random_values(rng, parameters.fixed)
        if parameters.key(parameters.policy(values)) not in known:
            return values
    return None


def _equal_record(study: SearchStudy, policy: Policy) -> TrialRecord | None:
    key = study.parameters.key(policy)
    return next((record for record in study.records if record.key == key and not record.is_cached), None)


def _require_reference(outcome: Outcome) -> None:
    """Stop where FP32 gives nothing to compare with.

    Raises:
        TaskError: the task itself raises; carries its traceback.
        StudyError: FP32 diverges, does not fit, or gives no number.
    """
    if outcome.kind == "user_error":
        raise TaskError(f"the task fails in FP32: {outcome.message}\n{outcome.traceback}".rstrip())
    if outcome.kind == "out_of_memory":
        raise StudyError(
            f"FP32 does not fit in memory ({outcome.message}); give a smaller --batch-size or --target-batch-size"
        )
    if not outcome.is_ok:
        raise StudyError(f"FP32 does not train ({outcome.kind}: {outcome.message}); nothing can be compared with it")
    if outcome.accuracy is None or outcome.eval_loss is None:
        raise StudyError(f"the metric or the loss is undefined on the held-out data in FP32 ({outcome.message})")
