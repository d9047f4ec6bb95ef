"""The loop of a search: the arms first, then the sampler's policies, each equal policy run once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from autoprec.errors import StudyError, TaskError
from autoprec.policy import Policy
from autoprec.search.arms import FP32, Arm
from autoprec.search.events import Events
from autoprec.search.study import SearchStudy, TrialRecord
from autoprec.trials.outcome import Outcome, TrialSettings

__all__ = ["Measure", "run_trials"]

Measure = Callable[[Policy, TrialSettings], Outcome]
"""Run one trial. Never raises for a policy that diverges or is impossible."""

MAX_REPEATS = 40
"""Equal policies in a row, told from the study without a run, after which the space counts as exhausted."""


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
    done = {record.arm for record in study.records}
    for arm in arms:
        if arm.name not in done and (arm.is_baseline or study.num_finished < n_trials):
            _run_one(study, measure, arm=arm, n_trials=n_trials, settings=settings, events=events)
    repeats = 0
    while study.num_finished < n_trials and not study.is_exhausted:
        record = _run_one(study, measure, arm=None, n_trials=n_trials, settings=settings, events=events)
        repeats = repeats + 1 if record.is_cached else 0
        if repeats >= MAX_REPEATS:
            study.mark_exhausted()
            events.note(f"the last {MAX_REPEATS} policies asked for were run before: the search space is exhausted")


def _run_one(
    study: SearchStudy,
    measure: Measure,
    *,
    arm: Arm | None,
    n_trials: int,
    settings: TrialSettings,
    events: Events,
) -> TrialRecord:
    trial = study.ask(arm)
    try:
        policy = arm.policy if arm else study.parameters.policy(trial.params)
        equal = _equal_record(study, policy)
        if equal is not None:
            return study.tell(trial, policy, equal.outcome, cached_from=equal.number)
        events.trial_started(trial.number, arm.name if arm else "sampled", policy)
        outcome = measure(policy, settings)
        if arm is not None and arm.name == FP32:
            _require_reference(outcome)
        record = study.tell(trial, policy, outcome)
    except BaseException:
        study.fail(trial)
        raise
    events.trial_finished(record, num_finished=study.num_finished, n_trials=n_trials)
    return record


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
