"""Print for each search space what it decides of a model of its family: decisions, and what they govern.

    python benchmarks/spaces.py [SPACE ...]

Shares are of one training step at the target shape: predicted time, and computed bytes that the forward pass saves
for the backward pass. A module's part is governed where a decision with a choice covers it. What the code between them
saves (residual sums, concatenations) is governed as far as it is halved where the decisions go from FP32 to FP16. The
loss is always in FP32 and is a part of what no decision governs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from autoprec.estimates import StepEstimate
from autoprec.policy import Policy, Precision, lies_in
from autoprec.search.plan import SearchPlan, SearchSettings, prepare_search
from autoprec.tasks.named import named_task
from autoprec.tasks.protocol import Task
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
    plan = prepare_search(build(), trial=trial, settings=SearchSettings(space=space))
    free = plan.parameters.free_decisions
    governed = {name for decision in free for name in decision.units}
    full, half = (estimate(plan, precision, trial) for precision in ("fp32", "fp16"))
    time = governed_time(half.time.seconds_by_unit, governed)
    saved = governed_bytes(full.memory.saved_by_unit, half.memory.saved_by_unit, governed)
    return f"{space:12s} {model:28s} {len(plan.decisions):9d} {len(free):5d} {time:15.1%} {saved:15.1%}"


def estimate(plan: SearchPlan, precision: Precision, trial: TrialSettings) -> StepEstimate:
    """Estimate a step with every decision in `precision` that can be, and the code between them under autocast."""
    modules = {name: precision for d in plan.decisions for name in d.units if precision in d.choices}
    return target_estimate(plan.task, Policy(default="autocast", dtype="fp16", modules=modules), trial)


def main() -> None:
    print(f"{'space':12s} {'model':28s} {'decisions':>9s} {'free':>5s} {'time governed':>15s} {'bytes governed':>15s}")
    for space in sys.argv[1:] or FAMILIES:
        print(describe(space), flush=True)


if __name__ == "__main__":
    main()
