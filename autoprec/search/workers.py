"""One worker of many on a study: it takes trials until the study's total is reached, and writes no file."""

from __future__ import annotations

import time

from autoprec.errors import UsageError
from autoprec.search.anchors import AnchoredMeasure
from autoprec.search.events import Events
from autoprec.search.lookahead import Measure
from autoprec.search.pipeline import open_search, present, with_lessons
from autoprec.search.plan import SearchPlan
from autoprec.search.profiling import learn
from autoprec.search.runner import run_trials
from autoprec.search.samplers import quiet_optuna
from autoprec.search.sharing import get_total, require_study, require_turns, set_total
from autoprec.search.storage import opened

__all__ = ["run_worker"]


def run_worker(plan: SearchPlan, measure: Measure, *, n_trials: int | None = None, events: Events | None = None) -> int:
    """Take trials from the study of `plan` until it holds as many finished ones as it is to have.

    The study's identity is compared first. What this process runs when it ends in good order (an exception, a
    signal that becomes one) is run again by another one; so is, once, what it runs when it is killed.

    Args:
        plan: with the study's storage and name; its `settings.n_trials` is not used.
        measure: runs a trial.
        n_trials: finished trials in all; None takes what the study was begun with, or is given meanwhile.
        events: hears of this worker's own trials.

    Returns:
        The number of finished trials that the study holds.

    Raises:
        UsageError: no storage, one without turns, no study, or a study of other settings.
        StudyError, TaskError: as `run_trials`.
    """
    events = events or Events()
    quiet_optuna()
    url, name = plan.settings.storage, plan.settings.study_name
    if url is None or name is None:
        raise UsageError("a worker needs the study's --storage and --study-name")
    require_turns(url)
    with opened(url) as storage:
        if n_trials is None:
            require_study(storage, name)
        with present(plan, storage, "worker", events) as presence:
            if n_trials is not None:
                set_total(presence.study, n_trials)
            own = AnchoredMeasure(measure, events) if plan.target_is_here else measure
            lessons = learn(plan, measure, events, presence)
            plan = with_lessons(plan, lessons)
            study = open_search(plan, storage, lessons, presence)
            events.resumed(study.records)
            ends = None if (seconds := plan.settings.timeout_seconds) is None else time.monotonic() + seconds
            done = -1
            while done < (total := get_total(presence.study)):  # which may be raised meanwhile
                run_trials(
                    study,
                    own,
                    arms=plan.arms,
                    n_trials=total,
                    settings=plan.trial,
                    events=events,
                    timeout_seconds=None if ends is None else max(0.0, ends - time.monotonic()),
                )
                done = total
            return study.num_finished
