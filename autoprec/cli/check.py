"""`autoprec check POLICY`: does it fit this model, what is uncovered or unknown, what differs; trains nothing."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autoprec.cli.output import NO_FIT, check_format, open_console, print_json, read_policy
from autoprec.cli.task_options import TaskOptions, option, takes_task

if TYPE_CHECKING:
    from autoprec.apply import PolicyFit

__all__ = ["register"]

MAX_NAMES = 12


def register(app: typer.Typer) -> None:
    app.command("check", help="Check whether a policy fits a model, and what differs; nothing is trained.")(_check)


@takes_task
def _check(
    task: TaskOptions,
    policy: Annotated[Path, typer.Argument(help="A policy.json, or the folder of a search.")],
    format: Annotated[str, option("text or json.", "--format")] = "text",
) -> None:
    check_format(format)
    found = read_policy(policy)

    import torch

    from autoprec.apply import check_fit
    from autoprec.trials.building import build_model

    built = task.build_task(found.training)
    fit = check_fit(build_model(built, torch.device(task.trial_settings().device)), found)
    if format == "json":
        print_json({"fits": fit.fits, **dataclasses.asdict(fit)})
    else:
        _print(fit, built.name)
    raise typer.Exit(0 if fit.fits else NO_FIT)


def _print(fit: PolicyFit, name: str) -> None:
    from autoprec.report.escaping import escaped

    console = open_console()
    lines = [
        f"fits {name}" if fit.fits else f"does not fit {name}: {fit.problem}",
        *([", ".join(f"{count} modules in {p}" for p, count in sorted(fit.counts.items()))] if fit.counts else []),
        *(f"note: {note}" for note in fit.notes),
        *(f"found elsewhere: {difference}; verify it here" for difference in fit.differences),
        *([f"no rule reaches, so the default: {_names(fit.uncovered)}"] if fit.uncovered else []),
        *([f"unknown to the policy: {_names(fit.unknown)}"] if fit.unknown else []),
    ]
    for line in lines:
        console.print(escaped(line), soft_wrap=True)


def _names(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return ", ".join(names[:MAX_NAMES]) + more
