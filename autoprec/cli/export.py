"""`autoprec export POLICY --to TOOL`: the policy as another tool's file, with what is lost said."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autoprec.cli.output import POLICY_FILE, read_policy
from autoprec.cli.task_options import TRAINING_OPTIONS, TaskOptions, option, takes_task
from autoprec.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    from torch import nn

    from autoprec.integrations.exported import Exported
    from autoprec.policy import Policy
    from autoprec.tasks.protocol import Task

__all__ = ["register"]

TOOLS = ("deepspeed", "accelerate", "lightning", "fsdp2", "onnx")
WITHOUT = ("seed", "device", "gpu", "optimizer", "lr", "compile", "compile_backend", *TRAINING_OPTIONS)


def register(app: typer.Typer) -> None:
    app.command("export", help="Write a policy as another tool's file, and say what of it is lost.")(_export_task)


def _export(
    task: TaskOptions,
    policy: Annotated[Path, typer.Argument(help="A policy.json, or the folder of a search.")],
    to: Annotated[str, option("deepspeed, accelerate, lightning, fsdp2 or onnx.", "--to")],
    output: Annotated[Path | None, option("The file to write; without it, standard output.", "-o", "--output")] = None,
    zero_stage: Annotated[int, option("ZeRO stage of a DeepSpeed configuration, 0 to 3.", "--zero-stage")] = 1,
) -> None:
    if to not in TOOLS:
        raise UsageError(f"--to {to!r}; allowed: {', '.join(TOOLS)}{did_you_mean(to, TOOLS)}")
    found = read_policy(policy)
    name = POLICY_FILE if policy.is_dir() else policy.name
    _write(_convert(found, to, task, zero_stage, name=name), output)


_export_task = takes_task(_export, without=WITHOUT)


def _convert(policy: Policy, to: str, task: TaskOptions, zero_stage: int, *, name: str) -> Exported:
    """Return the export; `name` is that of the policy's file."""
    if to == "deepspeed":
        from autoprec.integrations.deepspeed_config import deepspeed_config
        from autoprec.integrations.exported import target_batch_size

        said = task.target_batch_size if task.target_batch_size != TaskOptions().target_batch_size else None
        size = said or target_batch_size(policy) or task.target_batch_size
        return deepspeed_config(policy, zero_stage=zero_stage, micro_batch_size=size)
    if to in ("accelerate", "lightning"):
        from autoprec.integrations import launch_files

        write = launch_files.accelerate_config if to == "accelerate" else launch_files.lightning_config
        return write(policy, policy_file=name)
    if to == "fsdp2":
        from autoprec.integrations.fsdp2 import describe_units

        return describe_units(_build_model(task, policy)[1], policy)
    return _onnx_nodes(policy, task)


def _build_model(task: TaskOptions, policy: Policy) -> tuple[Task, nn.Module]:
    import torch

    from autoprec.trials.building import build_model

    built = task.build_task(policy.training)
    return built, build_model(built, torch.device("cpu"))


def _onnx_nodes(policy: Policy, task: TaskOptions) -> Exported:
    from autoprec.report.extras import require_extra

    require_extra("onnx", "onnx", "onnxscript")
    from autoprec.integrations.exported import Exported, as_json
    from autoprec.integrations.onnx import export_graph, nodes_by_precision
    from autoprec.trials.building import first_call

    built, model = _build_model(task, policy)
    nodes = nodes_by_precision(export_graph(model, *first_call(built, model)), model, policy)
    data = {"keep_in_fp32": nodes.fp32, "autocast_runs_in_fp32": nodes.autocast_fp32}
    note = (
        f"names of the graph that torch.onnx.export(dynamo=True) gives here: {len(nodes.fp32)} nodes of fp32 units, "
        f"{len(nodes.autocast_fp32)} that autocast runs in FP32, {len(nodes.low)} others"
    )
    lost = [f"{len(nodes.unplaced)} nodes name no module and follow the default"] if nodes.unplaced else []
    return Exported(as_json(data), tuple(lost), (note,))


def _write(exported: Exported, output: Path | None) -> None:
    from autoprec.policy import write_atomically
    from autoprec.report.escaping import printable

    for line in (*(f"lost: {each}" for each in exported.lost), *(f"note: {each}" for each in exported.notes)):
        print(printable(line), file=sys.stderr)
    if output is None:
        print(exported.text, end="")
        return
    try:
        write_atomically(output, exported.text)
    except OSError as error:
        raise UsageError(f"{output.name}: cannot be written ({error.strerror})") from error
    print(printable(f"written: {output}"))
