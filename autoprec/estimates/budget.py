"""A memory budget: the largest batch that fits, and what makes a wanted one fit, cheapest first. Nothing is run."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import nn

from autoprec.apply.structure import Structure, has_forward, read_structure
from autoprec.estimates.step import StepEstimate
from autoprec.policy import Number, Policy, lies_in

__all__ = ["Estimate", "Remedy", "blocks_to_checkpoint", "find_remedies", "largest_batch"]

MAX_BATCH = 2**20


class Estimate(Protocol):
    """Estimates one optimizer step of the same model, data and optimizer."""

    def __call__(
        self, policy: Policy, *, batch_size: int, accumulation_steps: int = 1, checkpoint: Sequence[str] = ()
    ) -> StepEstimate: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """One way to make the wanted batch fit.

    Attributes:
        name: "policy", "accumulation", "checkpointing", "sharded optimizer" or "split model".
        fits: whether the peak on each GPU is within the budget.
        peak_bytes: on each GPU, "computed".
        throughput_samples_per_second: of one GPU, "predicted"; None where GPUs talk, which is not predicted.
        setting: what to set, in words; or why it does not help.
        modules: what to checkpoint.
        num_gpus: how many GPUs it takes.
    """

    name: str
    fits: bool
    peak_bytes: Number
    throughput_samples_per_second: Number | None
    setting: str
    modules: tuple[str, ...] = ()
    num_gpus: int = 1


def largest_batch(peak_bytes: Callable[[int], float], budget_bytes: float, *, start: int) -> int:
    """Return the largest batch whose peak is within the budget, 0 where not even one sample fits.

    At any moment of a step the bytes alive grow linearly with the batch, so their maximum is convex: between two
    batches it lies below the chord, beyond them above it. Few estimates are then enough.

    Args:
        peak_bytes: batch size -> bytes; called a handful of times.
        start: the first batch tried, from 1.
    """
    known: dict[int, float] = {0: 0.0}
    low, high = 0, MAX_BATCH + 1
    guess = start
    while high - low > 1:
        known[guess] = peak_bytes(guess)
        low, high = (guess, high) if known[guess] <= budget_bytes else (low, guess)
        if low and _chord(known, low, budget_bytes, high):
            return low
        guess = _next_guess(known, low, high, budget_bytes)
    return low


def _chord(known: Mapping[int, float], low: int, budget_bytes: float, high: int) -> bool:
    """Whether the line through the two largest batches that fit shows that one more sample does not."""
    fitting = sorted(batch for batch in known if 0 < batch <= low)[-2:]
    if len(fitting) < 2 or low + 1 == high:
        return False
    slope = (known[fitting[1]] - known[fitting[0]]) / (fitting[1] - fitting[0])
    return known[low] + slope > budget_bytes


def _next_guess(known: Mapping[int, float], low: int, high: int, budget_bytes: float) -> int:
    """Follow the line through the two measured batches next to the border; strictly between `low` and `high`."""
    measured = sorted(batch for batch in known if batch > 0)
    if high > MAX_BATCH:
        if len(measured) < 2:
            return min(2 * low, MAX_BATCH)
        ends = measured[-2:]
    else:
        ends = [low, high] if low else ([high, measured[1]] if len(measured) > 1 else [high, high])
    if ends[0] == ends[1] or known[ends[0]] == known[ends[1]]:
        return max(low + 1, min(high - 1, (low + high) // 2))
    slope = (known[ends[1]] - known[ends[0]]) / (ends[1] - ends[0])
    return max(low + 1, min(high - 1, math.floor(ends[0] + (budget_bytes - known[ends[0]]) / slope)))


def find_remedies(
    estimate: Estimate, model: nn.Module, policy: Policy, *, batch_size: int, budget_bytes: float
) -> list[Remedy]:
    """Try what makes `batch_size` samples a step fit, each way on top of `policy` alone, in order of what it costs.

    The policy costs nothing; accumulation some launches; checkpointing a part of the forward pass once more; a sharded
    optimizer and a split model cost more GPUs and what they say to each other (each GPU keeps the whole batch).
    """
    whole = estimate(policy, batch_size=batch_size)
    found = [_remedy("policy", whole, budget_bytes, "the policy alone")]
    if found[0].fits:
        return found
    return [
        *found,
        _accumulation(estimate, policy, batch_size, budget_bytes),
        _checkpointing(estimate, model, policy, whole, batch_size, budget_bytes),
        _sharded_optimizer(whole, budget_bytes),
        _split_model(whole, model, budget_bytes),
    ]


def _remedy(name: str, step: StepEstimate, budget_bytes: float, setting: str, modules: Sequence[str] = ()) -> Remedy:
    return Remedy(
        name=name,
        fits=step.peak_memory_bytes.value <= budget_bytes,
        peak_bytes=step.peak_memory_bytes,
        throughput_samples_per_second=step.throughput_samples_per_second,
        setting=setting,
        modules=tuple(modules),
    )


def _accumulation(estimate: Estimate, policy: Policy, batch_size: int, budget_bytes: float) -> Remedy:
    """Take the largest micro-batch that divides the batch and fits, by halving the search over the divisors."""
    divisors = [size for size in range(1, batch_size) if batch_size % size == 0]
    tried = {}

    def step_of(size: int) -> StepEstimate:
        tried[size] = estimate(policy, batch_size=size, accumulation_steps=batch_size // size)
        return tried[size]

    best = _last_that_fits(divisors, lambda size: step_of(size).peak_memory_bytes.value <= budget_bytes)
    size = best if best is not None else (divisors[0] if divisors else batch_size)
    step = tried.get(size) or step_of(size)
    setting = f"--accumulation-steps {batch_size // size}, micro-batches of {size}"
    return _remedy("accumulation", step, budget_bytes, setting if best is not None else f"not enough: {setting}")


def _last_that_fits(choices: Sequence[int], fits: Callable[[int], bool]) -> int | None:
    """Bisect: the last of the choices that fits, where all before it fit too."""
    low, high = -1, len(choices)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(choices[middle]) else (low, middle)
    return choices[low] if low >= 0 else None


def _checkpointing(
    estimate: Estimate, model: nn.Module, policy: Policy, whole: StepEstimate, batch_size: int, budget_bytes: float
) -> Remedy:
    """Checkpoint as few blocks as make it fit, those first that free most for what they cost to run again."""
    blocks = blocks_to_checkpoint(model, whole)
    if not blocks:
        return _remedy("checkpointing", whole, budget_bytes, "no blocks that could be computed again")
    tried: dict[int, StepEstimate] = {}

    def misses(count: int) -> bool:
        tried[count] = estimate(policy, batch_size=batch_size, checkpoint=blocks[:count])
        return tried[count].peak_memory_bytes.value > budget_bytes

    counts = range(1, len(blocks) + 1)
    last_miss = _last_that_fits(counts, misses)
    count = min((last_miss or 0) + 1, len(blocks))
    setting = f"{count} of {len(blocks)} blocks"
    return _remedy("checkpointing", tried[count], budget_bytes, setting, sorted(blocks[:count], key=blocks.index))


def blocks_to_checkpoint(model: nn.Module, step: StepEstimate) -> list[str]:
    """Return the repeated blocks of a model in the order in which checkpointing them pays.

    Blocks are the composite children of a container (`nn.Sequential`, `nn.ModuleList`) that has two or more of them.
    What pays is the bytes that a block's forward keeps for the backward pass over the predicted seconds of its own.
    """
    structure = read_structure(model)
    gains: dict[str, float] = {}
    for name in _blocks(structure):
        kept = sum(size for unit, size in step.memory.saved_by_unit.items() if lies_in(unit, name))
        seconds = sum(spent for unit, spent in step.time.seconds_by_unit.items() if lies_in(unit, name))
        if kept:
            gains[name] = kept / max(seconds, 1e-9)
    return sorted(gains, key=lambda name: -gains[name])


def _blocks(structure: Structure) -> list[str]:
    found: list[str] = []
    for name, module in structure.unique():
        if not isinstance(module, nn.Sequential | nn.ModuleList) or any(lies_in(name, block) for block in found):
            continue
        children = [f"{name}.{key}" if name else key for key, child in module._modules.items() if child is not None]
        composite = [
            child
            for child in children
            if structure.modules[child]._modules and has_forward(structure.modules[child])
            and child not in structure.governors
        ]  # fmt: skip
        found += composite if len(composite) > 1 else []
    return found


def _sharded_optimizer(whole: StepEstimate, budget_bytes: float) -> Remedy:
    """The state is there all through the step, so the peak falls by what the other GPUs hold of it."""
    state = whole.by_category["optimizer_state"]
    return _sharded("sharded optimizer", whole, budget_bytes, fixed=0.0, shared=float(state), what="optimizer state")


def _split_model(whole: StepEstimate, model: nn.Module, budget_bytes: float) -> Remedy:
    """Parameters, gradients and optimizer state are split; two blocks at a time are gathered whole."""
    shared = sum(whole.by_category[name] for name in ("parameters", "gradients", "optimizer_state"))
    structure = read_structure(model)
    names = _blocks(structure) or [name for name, module in structure.unique() if name and module._parameters]
    sizes = [sum(p.numel() * p.element_size() for p in structure.modules[name].parameters()) for name in names]
    gathered = 2.0 * max(sizes, default=0)
    what = "parameters, gradients and optimizer state (fully_shard of each block)"
    return _sharded("split model", whole, budget_bytes, fixed=gathered, shared=float(shared), what=what)


def _sharded(name: str, whole: StepEstimate, budget_bytes: float, *, fixed: float, shared: float, what: str) -> Remedy:
    rest = whole.peak_memory_bytes.value - shared + fixed
    num_gpus = max(2, math.ceil(shared / (budget_bytes - rest))) if budget_bytes > rest else 0
    peak = rest + shared / num_gpus if num_gpus else rest
    return Remedy(
        name=name,
        fits=num_gpus > 0,
        peak_bytes=Number(value=peak, kind="computed"),
        throughput_samples_per_second=None,
        setting=f"{what} over {num_gpus} GPUs" if num_gpus else f"not enough over any number of GPUs: {what}",
        num_gpus=max(num_gpus, 1),
    )
