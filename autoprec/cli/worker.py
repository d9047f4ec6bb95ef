"""`autoprec worker`: take trials from a study that others run, too, until its total is reached."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from autoprec.cli.output import INTERRUPTED, open_console
from autoprec.cli.signals import interruptible
from autoprec.cli.study_options import StudyOptions
from autoprec.cli.task_options import TaskOptions, option, takes_task
from autoprec.errors import UsageError

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    text = "Take trials from a study that others run, too: the options of its search, on this device."
    app.command("worker", help=text)(_worker)


@takes_task
def _worker(
    task: TaskOptions,
    study: StudyOptions,
    n_trials: Annotated[
        int | None, option("Finished trials of the study in all; what its search says.", "--n-trials", min=1)
    ] = None,
) -> None:
    from autoprec.trials.lifeline import follow_parent

    follow_parent()  # a job of an engine
    if study.storage is None or study.study_name is None:
        raise UsageError("a worker needs --storage and --study-name: those of the search that it joins")
    try:
        with interruptible():
            num_finished = _run(task, study, n_trials)
    except KeyboardInterrupt:
        print("interrupted; another worker runs the trial again", file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from None
    print(f"the study holds {num_finished} finished trials")


def _run(task: TaskOptions, study: StudyOptions, n_trials: int | None) -> int:
    from autoprec.cli.progress import Progress
    from autoprec.search.measuring import open_measure
    from autoprec.search.workers import run_worker

    plan = study.prepare(task, num_workers=1)
    with (
        Progress(open_console(for_progress=True), plan) as progress,
        open_measure(plan.task, timeout_seconds=study.trial_timeout) as measure,
    ):
        return run_worker(plan, measure, n_trials=n_trials, events=progress)
