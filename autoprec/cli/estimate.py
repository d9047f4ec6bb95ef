"""`autoprec estimate`: memory by category and unit, and predicted throughput, without running; what a budget allows."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autoprec.cli.output import check_format, open_console, parse_memory, print_json, read_policy
from autoprec.cli.task_options import TaskOptions, option, takes_task
from autoprec.errors import UsageError

if TYPE_CHECKING:
    from autoprec.estimates import Remedy, StepEstimate
    from autoprec.policy import Policy
    from autoprec.trials.target import TargetEstimator

__all__ = ["register"]

NUM_UNITS = 14
"""Rows of the table by unit; deeper modules are added to those above them."""
FEW_SAMPLES = 2
"""Samples that are really made; the batch is rescaled from them without making it."""
WITHOUT = ("batch_size", "target_batch_size", "device", "compile", "compile_backend")


def register(app: typer.Typer) -> None:
    text = "Compute memory and predict throughput of a training step, without running it."
    app.command("estimate", help=text)(takes_task(_estimate, without=WITHOUT))


def _estimate(
    task: TaskOptions,
    policy: Annotated[Path | None, option("A policy.json, or the folder of a search.", "--policy")] = None,
    batch_size: Annotated[
        int | None, option("Samples in one batch; the task's own, else 128.", "--batch-size", min=1)
    ] = None,
    memory_budget: Annotated[
        str | None, option("Largest batch within it, and what makes the wanted one fit: 12GB.", "--memory-budget")
    ] = None,
    format: Annotated[str, option("text or json.", "--format")] = "text",
) -> None:
    check_format(format)
    budget = parse_memory(memory_budget)
    found = None if policy is None else read_policy(policy)
    named = task.task is None
    small = dataclasses.replace(task, target_batch_size=FEW_SAMPLES, batch_size=FEW_SAMPLES) if named else task
    estimator, name = _open(small, found)
    wanted = batch_size or (task.target_batch_size if named else estimator.num_samples)
    arms = _arms(found, task.gpu)
    steps, refused = _steps(estimator, arms, wanted)
    arms = {arm: each for arm, each in arms.items() if arm in steps}
    largest, remedies = None, []
    if budget is not None:
        from autoprec.estimates import find_remedies

        best = arms.get("policy") or arms.get("autocast fp16") or arms["fp32"]
        largest = _largest(estimator, arms, budget, wanted)
        remedies = find_remedies(estimator, estimator.model, best, batch_size=wanted, budget_bytes=budget)
    if format == "json":
        document = _document(name, wanted, steps, largest, remedies, budget)
        document["arms"] |= {arm: {"refused": reason} for arm, reason in refused.items()}
        print_json(document)
    else:
        _print(f"{name}, batch {wanted:,}", steps, largest, remedies, memory_budget or "", refused)


def _open(task: TaskOptions, policy: Policy | None) -> tuple[TargetEstimator, str]:
    from autoprec.estimates import gpu_by_name
    from autoprec.trials.outcome import TrialSettings
    from autoprec.trials.target import TargetEstimator

    settings = TrialSettings(seed=task.seed, gpu=gpu_by_name(task.gpu).name)
    built = task.build_task(None if policy is None else policy.training)
    return TargetEstimator(built, settings), built.name


def _arms(policy: Policy | None, gpu: str) -> dict[str, Policy]:
    """The baselines under their names, without what a search would load, and the policy where there is one."""
    from autoprec.estimates import gpu_by_name
    from autoprec.policy import Policy

    arms = {"fp32": Policy(default="fp32"), "autocast fp16": Policy(default="autocast", dtype="fp16")}
    if policy is None:
        return arms
    if "bf16" in policy.low_precisions and not gpu_by_name(gpu).native_bf16:
        raise UsageError(f"the policy computes in bf16, which {gpu_by_name(gpu).product} has no units for")
    return {**arms, "policy": policy}


def _steps(
    estimator: TargetEstimator, arms: Mapping[str, Policy], batch_size: int
) -> tuple[dict[str, StepEstimate], dict[str, str]]:
    """Estimate a step of each arm; of those whose precision an operator refuses, return what refused. FP32 must run."""
    from autoprec.trials.failures import classify, describe

    steps: dict[str, StepEstimate] = {}
    refused: dict[str, str] = {}
    for arm, policy in arms.items():
        try:
            steps[arm] = estimator(policy, batch_size=batch_size)
        except Exception as error:
            if classify(error, policy) != "unsupported":
                raise
            refused[arm] = describe(error, estimator.model)
    return steps, refused


def _largest(
    estimator: TargetEstimator, arms: Mapping[str, Policy], budget: float, wanted: int
) -> dict[str, int | None]:
    """Return the largest batch of each arm; None where only real steps tell, and this machine should not try them."""
    from autoprec.estimates import UnaffordableError, largest_batch

    def peak(policy: Policy, size: int) -> float:
        return estimator(policy, batch_size=size).peak_memory_bytes.value

    found: dict[str, int | None] = {}
    for name, policy in arms.items():
        try:
            found[name] = largest_batch(partial(peak, policy), budget, start=wanted)
        except UnaffordableError:
            found[name] = None
    return found


def _print(
    title: str, steps: Mapping[str, StepEstimate], largest: Mapping[str, int | None] | None, remedies: Sequence[Remedy],
    budget: str, refused: Mapping[str, str],
) -> None:  # fmt: skip
    from autoprec.estimates import GPUS
    from autoprec.report.escaping import escaped
    from autoprec.report.estimates import estimate_table, remedy_table, unit_table

    console = open_console()
    first = next(iter(steps.values()))
    whole = f"{title}, on {GPUS[first.gpu].product}{' with TF32' if first.tf32 else ''}"
    console.print(estimate_table(steps, title=whole, largest=largest, budget=budget))
    console.print(unit_table(steps, count=NUM_UNITS))
    if remedies:
        console.print(remedy_table(remedies, title=f"what makes the batch fit in {budget}, in order of cost"))
    for arm, reason in refused.items():
        console.print(escaped(f"{arm}: not estimated, since it cannot run: {reason}"), soft_wrap=True)
    notes = dict.fromkeys(note for step in steps.values() for note in step.notes)
    for note in (*notes, "not in the peak: CUDA context, library workspaces, fragmentation, communication buffers"):
        console.print(escaped(f"note: {note}"), soft_wrap=True)


def _document(
    name: str, batch_size: int, steps: Mapping[str, StepEstimate], largest: Mapping[str, int | None] | None,
    remedies: Sequence[Remedy], budget: float | None,
) -> dict[str, Any]:  # fmt: skip
    document: dict[str, Any] = {"task": name, "batch_size": batch_size, "arms": {}}
    for arm, step in steps.items():
        document["arms"][arm] = {
            "peak_memory_bytes": _number(step.peak_memory_bytes),
            "throughput_samples_per_second": _number(step.throughput_samples_per_second),
            "memory_by_category": dict(step.by_category),
            "memory_by_unit": dict(step.by_unit),
            "launch_share": step.launch_share,
            "gpu": step.gpu,
            "fits": step.fits,
            "notes": list(step.notes),
            **({} if largest is None else {"largest_batch": largest[arm]}),
        }
    if budget is not None:
        remedy_fields = [dataclasses.asdict(remedy) for remedy in remedies]
        document["memory_budget_bytes"] = budget
        document["remedies"] = [{key: _number(value) for key, value in fields.items()} for fields in remedy_fields]
    return document


def _number(value: Any) -> Any:
    return value.model_dump(mode="json", exclude_none=True) if hasattr(value, "model_dump") else value
