"""`autoprec doctor`: a short run under watch that finds the known troubles of mixed precision and names the layer."""

from __future__ import annotations

import contextlib
import dataclasses
import runpy
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autoprec.cli.output import WORSE, check_format, open_console, print_json, read_policy
from autoprec.cli.task_options import TaskOptions, option, takes_task
from autoprec.errors import TaskError, UsageError

if TYPE_CHECKING:
    from autoprec.doctor import Finding, Observations
    from autoprec.policy import Policy

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    text = "Watch a few steps of a training, a task or your own loop, and name each trouble and its layer."
    app.command("doctor", help=text)(_doctor)


@takes_task
def _doctor(
    task: TaskOptions,
    policy: Annotated[Path | None, option("Train a task under this policy; stock autocast FP16.", "--policy")] = None,
    num_steps: Annotated[int, option("Optimizer steps to watch.", "--num-steps", min=2)] = 12,
    format: Annotated[str, option("text or json.", "--format")] = "text",
    script: Annotated[
        list[str] | None, typer.Argument(help="A script to run as it is; its own options after --.", metavar="SCRIPT")
    ] = None,
) -> None:
    check_format(format)
    from autoprec.doctor import diagnose, summarise

    found = None if policy is None else read_policy(policy)
    with contextlib.redirect_stdout(sys.stderr):  # what the training itself prints is no result
        seen = _examine_script(script, task, found, num_steps) if script else _examine(task, found, num_steps)
    findings, facts = diagnose(seen), summarise(seen)
    if format == "json":
        print_json({"findings": [dataclasses.asdict(finding) for finding in findings], "facts": facts})
    else:
        _print(findings, facts)
    raise typer.Exit(WORSE if any(finding.is_wrong for finding in findings) else 0)


def _examine(task: TaskOptions, policy: Policy | None, num_steps: int) -> Observations:
    from autoprec.doctor import examine
    from autoprec.tasks import Task
    from autoprec.tasks.loading import load_function
    from autoprec.tasks.source import source_named

    settings = task.trial_settings()
    if task.task is None or source_named(task.task).kind != "function":
        built = task.build_task(None if policy is None else policy.training)
        return examine(built, policy=policy, settings=settings, num_steps=num_steps)
    function, options = load_function(task.task), task.training_options()

    def training() -> Any:
        made = function()
        return dataclasses.replace(made, **options) if isinstance(made, Task) else made

    return examine(training, policy=policy, settings=settings, num_steps=num_steps)


def _examine_script(script: list[str], task: TaskOptions, policy: Policy | None, num_steps: int) -> Observations:
    """Run a file as `python FILE ...` would, with the rest as its arguments."""
    from autoprec.doctor import examine

    path = Path(script[0])
    if task.task is not None or policy is not None:
        raise UsageError(f"script {path.name!r} decides everything itself; leave out --task and --policy")
    if not path.is_file():
        raise UsageError(f"script {path.name!r}: there is no such file")

    def run() -> None:
        arguments, search = sys.argv, list(sys.path)
        sys.argv, sys.path[:0] = list(script), [str(path.parent.resolve())]
        try:
            runpy.run_path(str(path), run_name="__main__")
        except SystemExit as end:
            if end.code not in (None, 0):
                raise TaskError(f"script {path.name!r} ended with exit code {end.code}") from end
        finally:
            sys.argv, sys.path[:] = arguments, search

    return examine(run, settings=task.trial_settings(), num_steps=num_steps)


def _print(findings: list[Finding], facts: dict[str, str]) -> None:
    from rich.table import Table

    from autoprec.report.escaping import escaped

    console = open_console()
    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value in facts.items():
        table.add_row(name, escaped(value))
    console.print(table)
    for finding in findings:
        place = f" in {finding.unit}" if finding.unit else ""
        mark = "WRONG" if finding.is_wrong else "note"
        console.print(f"\n[bold]{mark}: {escaped(finding.name + place)}[/]", soft_wrap=True)
        for label, text in (("seen", finding.seen), ("why", finding.why), ("change", finding.change)):
            console.print(f"  {label:<7} {escaped(text)}", soft_wrap=True)
    if not findings:
        console.print("nothing wrong was found in these steps")
