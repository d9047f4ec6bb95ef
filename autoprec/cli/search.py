"""`autoprec search`: run the study, prove the finalists, write policy.json."""

from __future__ import annotations

import dataclasses
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autoprec.cli.engine_options import EngineOptions
from autoprec.cli.output import (
    INCONCLUSIVE,
    INTERRUPTED,
    check_folder,
    check_format,
    open_console,
    parse_memory,
    print_json,
)
from autoprec.cli.signals import interruptible
from autoprec.cli.study_options import StudyOptions
from autoprec.cli.task_options import TaskOptions, as_arguments, option, takes_task
from autoprec.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from autoprec.search.parameters import Parameters
    from autoprec.search.pipeline import SearchResult
    from autoprec.search.plan import SearchPlan

__all__ = ["register"]


NO_TRIALS = ["--n-trials", "1"]
"""Arguments with which no trial is begun: those that the study holds are proved."""


def register(app: typer.Typer) -> None:
    app.command("search", help="Search the precision policy of a training task and prove it.")(_search)


@takes_task
def _search(
    task: TaskOptions,
    study: StudyOptions,
    engine: EngineOptions,
    n_trials: Annotated[int, option("Finished trials in all, the proof not counted.", "--n-trials")] = 12,
    memory_budget: Annotated[
        str | None, option("Recommend nothing that needs more, such as 12GB.", "--memory-budget")
    ] = None,
    workers: Annotated[
        int | None,
        option("Trials at once where no time is measured: cores, up to 4; or workers of an engine.", "--workers"),
    ] = None,
    devices: Annotated[
        str | None, option("Several GPUs of one product, a trial on each: cuda:0,cuda:1.", "--devices")
    ] = None,
    output: Annotated[Path | None, option("Folder for the files.", "-o", "--output")] = None,
    format: Annotated[str, option("text or json.", "--format")] = "text",
) -> None:
    started = time.perf_counter()
    check_format(format)
    check_folder(output)  # before torch is loaded
    from autoprec.trials.lifeline import follow_parent

    follow_parent()  # the proof of a search on an engine
    if not engine.is_local:
        if devices is not None:
            raise UsageError(f"--devices: not with --engine {engine.engine}, which gives each worker its own")
        arguments = ["--n-trials", str(n_trials)]
        budget = [] if memory_budget is None else ["--memory-budget", memory_budget]
        parse_memory(memory_budget)
        raise typer.Exit(
            _search_elsewhere(task, study, engine, arguments, budget, workers=workers, output=output, format=format)
        )
    settings = {
        "n_trials": n_trials,
        "memory_budget_bytes": parse_memory(memory_budget),
        "num_workers": workers,
        "output": output,
    }
    try:
        with interruptible():
            plan = _prepare(task, study, devices=devices, settings=settings)
            timeout = study.trial_timeout
            result, shares = _run(plan, trial_timeout=timeout, to_stderr=format == "json", started=started)
    except KeyboardInterrupt:
        print("interrupted; the same command goes on where it stopped", file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from None
    _report(result, shares, wall_seconds=time.perf_counter() - started, format=format)
    raise typer.Exit(0 if result.is_conclusive else INCONCLUSIVE)


def _search_elsewhere(
    task: TaskOptions,
    study: StudyOptions,
    engine: EngineOptions,
    total: list[str],
    budget: list[str],
    *,
    workers: int | None,
    output: Path | None,
    format: str,
) -> int:
    """Let an engine run the search; print what its proof printed, and return its exit code."""
    from autoprec.cli.progress import TrialLines

    study_apart = dataclasses.replace(study, storage=None, study_name=None)
    shared = [*as_arguments(task, study_apart), *total]
    # The workers had the time; the proof has to make none of the trials that it left, and may take as long as it needs.
    proof, held = dataclasses.replace(study_apart, timeout=None), total if study.timeout is None else NO_TRIALS
    try:
        with interruptible():
            finished = engine.run(
                shared,
                [*as_arguments(task, proof), *held, *budget, "--format", format],
                storage=study.storage,
                study_name=study.study_name,
                num_workers=workers,
                num_gpus=0 if task.device == "cpu" else study.gpus_per_trial,
                output=output,
                events=TrialLines(open_console(to_stderr=format == "json", for_progress=True)),
            )
    except KeyboardInterrupt:
        print("interrupted; the same command goes on where it stopped", file=sys.stderr)
        return INTERRUPTED
    print(finished.stdout, end="")
    if finished.exit_code not in (0, INCONCLUSIVE):
        print(finished.stderr, end="", file=sys.stderr)
    return finished.exit_code


def _prepare(task: TaskOptions, study: StudyOptions, *, devices: str | None, settings: dict[str, Any]) -> SearchPlan:
    from autoprec.search.plan import resolve_devices

    several = () if devices is None else tuple(resolve_devices(devices))
    if several and task.device is not None:
        raise UsageError("--device and --devices: one of them is needed")
    chosen = dataclasses.replace(task, device=several[0]) if several else task
    return study.prepare(chosen, devices=several, **settings)


def _run(
    plan: SearchPlan, *, trial_timeout: float, to_stderr: bool, started: float
) -> tuple[SearchResult, dict[str, float]]:
    from autoprec.cli.progress import Progress
    from autoprec.search.measuring import open_measure
    from autoprec.search.pipeline import run_search

    console = open_console(to_stderr=to_stderr, for_progress=True)
    _announce(plan, console)
    with (
        Progress(console, plan) as progress,
        open_measure(
            plan.task, timeout_seconds=trial_timeout, num_workers=plan.num_workers, devices=plan.devices
        ) as measure,
    ):
        result = run_search(plan, measure, events=progress)
        return result, progress.shares(time.perf_counter() - started)


def _announce(plan: SearchPlan, console: Console) -> None:
    from autoprec.cli.progress import forecast
    from autoprec.report.escaping import escaped
    from autoprec.search.metric import metric_of

    settings, proof, parameters = plan.settings, plan.settings.proof, plan.parameters
    num_baselines = sum(arm.is_baseline for arm in plan.arms)
    kind = "measured" if plan.target_is_here else "computed and predicted"
    shape = "the longest training batch"
    if plan.task.target is not None:
        shape = plan.task.target.description or f"batches of {plan.task.target.batch_size}"
    pinned = [decision for decision in plan.decisions if decision.is_pinned]
    metric = metric_of(plan.task)
    margin = (
        f"at most {proof.max_lost_share:.0%} of what FP32 gains"
        if proof.margin is None
        else f"margin {proof.margin:g} of {metric.name}"
    )
    direction = "higher" if metric.higher_is_better else "lower"
    lines = [
        f"task      {plan.task.name}, trained here on {', '.join(plan.devices)}"
        + ("" if plan.target_is_here else f" with {_arithmetic(parameters)}"),
        f"dtype     {_dtype_told(parameters)}",
        f"target    {shape} on {plan.target} ({kind})",
        f"space     {plan.space.name}: {plan.space.description}; {len(parameters.free_decisions)} decisions, "
        f"{len(pinned)} pinned",
        *(f"pinned    {d.name} to {d.choices[0]}: {'; '.join(d.reasons.values())}" for d in pinned[:10]),
        f"trials    {settings.n_trials} in all: {num_baselines} baselines, up to {len(plan.arms) - num_baselines} warm "
        f"starts, then {settings.sampler}; {plan.trial.warmup_steps + plan.trial.measured_steps} steps each"
        + (f", {plan.num_workers} at once" if plan.num_workers > 1 else "")
        + (f", {plan.trial.num_processes} GPUs together" if plan.trial.num_processes > 1 else "")
        + (
            f"; {settings.timeout_seconds:g} s in all, the proof included"
            if settings.timeout_seconds is not None
            else ""
        ),
        "proof     none (--quick)"
        if settings.is_quick
        else f"proof     by {metric.name}, {direction} is better: {margin} may be lost; {proof.looks[0]} to "
        f"{proof.max_seeds} seeds of {proof.num_steps} steps for each arm, up to {proof.max_steps} steps or "
        f"{proof.max_seconds:g} s while FP32 learns too little",
        f"against   {plan.present}, which gains are told against (--compare)",
        f"time      {forecast(plan)}",
        f"study     {plan.study_name} in {plan.folder}",
        *(f"note      {note}" for note in plan.notes),
    ]
    for line in lines:
        console.print(escaped(line), soft_wrap=True)


def _arithmetic(parameters: Parameters) -> str:
    """Say how the halves of a study are computed on this CPU."""
    import torch

    from autoprec.emulation.arithmetic import emulated_dtypes

    has_own = torch.bfloat16 not in emulated_dtypes()
    by_dtype = {
        "bf16": "BF16 by this CPU's own instructions, CUDA's autocast rules emulated" if has_own else "BF16 emulated",
        "fp16": "FP16 emulated",
    }
    return by_dtype.get(parameters.dtype, f"FP16 emulated, {by_dtype['bf16']}")


def _dtype_told(parameters: Parameters) -> str:
    return {
        "bf16": "bf16, without a grad scaler",
        "fp16": "fp16, with a grad scaler",
        "both": "bf16 without and fp16 with a grad scaler, each policy of one of them",
        "mixed": "bf16 with fp16 modules, and a grad scaler where there are some",
    }[parameters.dtype]


def _report(result: SearchResult, shares: dict[str, float], *, wall_seconds: float, format: str) -> None:
    from autoprec.cli.progress import print_margin, show_shares
    from autoprec.report.escaping import escaped
    from autoprec.report.front import front_table
    from autoprec.report.tables import comparison_table
    from autoprec.search.export import arm_evidence
    from autoprec.search.front import read_front

    evidence = result.policy.evidence
    arms = evidence.arms if evidence is not None else arm_evidence(result.candidates, result.verification)
    files = [str(result.folder / name) for name in ("policy.json", "front.json")]
    if format == "json":
        document = {
            "study_name": result.plan.study_name,
            "recommendation": {
                "choice": result.choice.kind,
                "name": result.choice.name,
                "sentence": result.choice.sentence,
                "provisional": result.choice.provisional,
            },
            "num_trials": sum(not record.is_cached for record in result.records),
            "verdicts": {name: verdict.kind for name, verdict in result.verification.verdicts.items()},
            "compared_with": result.plan.present,
            "metric": result.verification.metric.name,
            "num_steps": result.verification.num_steps,
            "margin": result.verification.margin,
            "provable_margin": result.verification.provable_margin,
            "arms": {name: arm.model_dump(mode="json", exclude_none=True) for name, arm in arms.items()},
            "files": files,
            "wall_seconds": wall_seconds,
            "time_shares": shares,
        }
        print_json(document)
        return
    console = open_console()
    title = f"{result.plan.task.name} on {result.plan.target}"
    console.print(
        comparison_table(arms, metric=result.verification.metric.name, reference=result.plan.present, title=title)
    )
    if result.plan.settings.memory_budget_bytes is not None:
        console.print(front_table(read_front(result.folder / "front.json")))
    print_margin(console, result.verification)
    console.print(escaped(result.choice.sentence), soft_wrap=True)
    console.print(show_shares(shares, wall_seconds))
    console.print(escaped(f"written: {', '.join(files)}"), soft_wrap=True)
