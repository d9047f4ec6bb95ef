"""Print for each search space what it decides of a model of its family: decisions, and what they govern.

    python benchmarks/spaces.py [SPACE ...]

Shares are of one training step at the target shape: predicted time, and computed bytes that the forward pass saves
for the backward pass. A module's part is governed where a decision with a choice covers it. What the code between them
saves (residual sums, concatenations) is governed as far as it is halved where the decisions go from FP32 to FP16.

What a loss outside the model saves beyond the model's outputs is FP32 under every policy, as is promised: no space can
govern it. Its share has a column of its own; `of model` is the governed share of what the model itself saves, `of all`
that of the whole step.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autoprec.estimates import StepEstimate
from autoprec.policy import Policy, Precision, lies_in
from autoprec.search.plan import SearchPlan, SearchSettings, prepare_search
from autoprec.tasks.batches import tensors_of
from autoprec.tasks.named import named_task
from autoprec.tasks.protocol import Loss, Task
from autoprec.tasks.source import resolve_task
from autoprec.trials.outcome import TrialSettings
from autoprec.trials.target import target_estimate

TRAININGS = Path(__file__).resolve().parents[1] / "examples" / "trainings"


def example(name: str) -> Callable[[], Task]:
    return lambda: resolve_task(f"{TRAININGS / name}.py:task")


FAMILIES: Mapping[str, tuple[str, Callable[[], Task]]] = {
    "cnn": ("mobilenet_v2", lambda: named_task("mobilenet_v2")),
    "resnet": ("resnet50", lambda: named_task("resnet50")),
    "vit": ("vit_b_16", lambda: named_task("vit_b_16")),
    "transformer": ("gpt-small", lambda: named_task("gpt-small")),
    "bert": ("examples/trainings/bert.py", example("bert")),
    "gpt": ("examples/trainings/gpt.py", example("gpt")),
    "rnn": ("lstm", lambda: named_task("lstm")),
    "speech": ("conv1d", lambda: named_task("conv1d")),
    "mlp": ("mlp", lambda: named_task("mlp")),
    "unet": ("examples/trainings/unet.py", example("unet")),
    "default": ("mlp", lambda: named_task("mlp")),
}


def governed_time(seconds: Mapping[str, float], governed: set[str]) -> float:
    return sum(value for name, value in seconds.items() if covers(governed, name)) / sum(seconds.values())


def governed_bytes(full: Mapping[str, int], half: Mapping[str, int], governed: set[str]) -> float:
    """Return the governed part of `full`, the bytes by module in FP32, where `half` are those in FP16."""
    inside = sum(size for name, size in full.items() if covers(governed, name))
    code = [(size, half.get(name, 0)) for name, size in full.items() if not covers(governed, name)]
    following = sum(min(size, 2 * max(0, size - halved)) for size, halved in code)
    return (inside + following) / sum(full.values())


def covers(governed: set[str], name: str) -> bool:
    return any(lies_in(name, module) for module in governed)


def describe(space: str) -> str:
    """Return the row of one space."""
    model, build = FAMILIES[space]
    trial = TrialSettings()
    plan = prepare_search(build(), trial=trial, settings=SearchSettings(space=space, dtype="fp16"))
    free = plan.parameters.free_decisions
    governed = {name for decision in free for name in decision.units}
    full, half = (estimate(plan, plan.task, precision, trial) for precision in ("fp32", "fp16"))
    alone = dataclasses.replace(plan.task, loss=sum_of_outputs(plan.task.loss))
    own, own_half = (estimate(plan, alone, precision, trial) for precision in ("fp32", "fp16"))
    shares = [
        governed_time(half.time.seconds_by_unit, governed),
        governed_bytes(own.memory.saved_by_unit, own_half.memory.saved_by_unit, governed),
        governed_bytes(full.memory.saved_by_unit, half.memory.saved_by_unit, governed),
        1 - sum(own.memory.saved_by_unit.values()) / sum(full.memory.saved_by_unit.values()),
    ]
    counts = f"{len(plan.decisions):9d} {len(free):5d}"
    return f"{space:12s} {model:28s} {counts}" + "".join(f"{share:10.1%}" for share in shares)


def sum_of_outputs(loss: Loss) -> Loss:
    """Return a loss that calls the model as `loss` does and saves nothing of its own."""

    def run(model: nn.Module, batch: Any) -> torch.Tensor:
        found: list[torch.Tensor] = []
        handle = model.register_forward_hook(lambda module, args, output: found.extend(tensors_of(output)))
        loss(model, batch)
        handle.remove()
        return torch.stack([tensor.sum() for tensor in found if tensor.requires_grad]).sum()

    return run


def estimate(plan: SearchPlan, task: Task, precision: Precision, trial: TrialSettings) -> StepEstimate:
    """Estimate a step with every decision in `precision` that can be, and the code between them under autocast."""
    modules = {name: precision for d in plan.decisions for name in d.units if precision in d.choices}
    return target_estimate(task, Policy(default="autocast", dtype="fp16", modules=modules), trial)


def main() -> None:
    print(f"{'':57s}{'time':>10s}{'saved bytes governed':>20s}{'loss':>10s}")
    columns = ("governed", "of model", "of all", "of bytes")
    print(f"{'space':12s} {'model':28s} {'decisions':>9s} {'free':>5s}" + "".join(f"{text:>10s}" for text in columns))
    for space in sys.argv[1:] or FAMILIES:
        print(describe(space), flush=True)


if __name__ == "__main__":
    main()
