"""A memory budget: the largest batch against counting up by one, each way to make a batch fit against an estimate."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autoprec.apply import checkpoint_modules, remove_checkpointing
from autoprec.estimates import Estimate, StepEstimate, estimate_step, find_remedies, largest_batch
from autoprec.policy import Policy

MOMENTS = [(500.0, 3.0), (100.0, 20.0), (40.0, 24.5)]
"""Bytes alive at three moments of a step: fixed ones, and for each sample."""


def peak(batch_size: int) -> float:
    return max(fixed + slope * batch_size for fixed, slope in MOMENTS)


@pytest.mark.parametrize("budget", [0, 500, 503, 560, 700, 1234, 99_999, 10_000_000])
@pytest.mark.parametrize("start", [1, 7, 128, 4096])
def test_the_largest_batch_is_the_one_that_counting_up_finds(budget: float, start: int) -> None:
    calls: list[int] = []

    def counted(batch_size: int) -> float:
        calls.append(batch_size)
        return peak(batch_size)

    size = largest_batch(counted, budget, start=start)
    assert size == 0 or peak(size) <= budget
    assert peak(size + 1) > budget
    assert len(calls) <= 20
    assert len(set(calls)) == len(calls)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x)


def estimator(model: nn.Module) -> Estimate:
    def estimate(
        policy: Policy, *, batch_size: int, accumulation_steps: int = 1, checkpoint: tuple[str, ...] = ()
    ) -> StepEstimate:
        checkpoint_modules(model, checkpoint)
        try:
            return estimate_step(
                model,
                torch.zeros(2, 64),
                lambda model, x: model(x).square().mean(),
                policy=policy,
                batch_size=batch_size,
                accumulation_steps=accumulation_steps,
            )
        finally:
            remove_checkpointing(model)

    return estimate


def test_each_remedy_says_what_an_estimate_with_it_says() -> None:
    model = nn.Sequential(*(Block() for _ in range(4)), nn.Linear(64, 8))
    policy, estimate = Policy(default="autocast"), estimator(model)
    whole = estimate(policy, batch_size=4096).peak_memory_bytes.value
    remedies = {
        remedy.name: remedy
        for remedy in find_remedies(estimate, model, policy, batch_size=4096, budget_bytes=0.8 * whole)
    }
    assert list(remedies) == ["policy", "accumulation", "checkpointing", "sharded optimizer", "split model"]
    assert not remedies["policy"].fits
    assert remedies["accumulation"].fits
    assert remedies["accumulation"].setting == "--accumulation-steps 2, micro-batches of 2048"
    checkpointed = remedies["checkpointing"]
    assert checkpointed.fits
    assert 1 <= len(checkpointed.modules) < 4
    again = estimate(policy, batch_size=4096, checkpoint=checkpointed.modules).peak_memory_bytes
    assert checkpointed.peak_bytes == again
    fewer = estimate(policy, batch_size=4096, checkpoint=checkpointed.modules[:-1]).peak_memory_bytes
    assert fewer.value > 0.8 * whole
    assert not remedies["sharded optimizer"].fits  # activations alone are more than the budget
    assert remedies["split model"].throughput_samples_per_second is None


def test_where_the_state_rules_the_optimizer_is_shared_among_as_few_gpus_as_hold_it() -> None:
    model = nn.Sequential(Block(), Block())
    policy, estimate = Policy(default="fp32"), estimator(model)
    step = estimate(policy, batch_size=1)
    state = step.by_category["optimizer_state"]
    budget = step.peak_memory_bytes.value - 0.7 * state
    remedies = find_remedies(estimate, model, policy, batch_size=1, budget_bytes=budget)
    sharded = next(remedy for remedy in remedies if remedy.name == "sharded optimizer")
    assert (sharded.fits, sharded.num_gpus) == (True, 4)  # a quarter stays, three quarters go: more than 0.7
    assert sharded.peak_bytes.value == step.peak_memory_bytes.value - 0.75 * state


def test_a_policy_that_fits_needs_nothing_else() -> None:
    model = nn.Sequential(Block(), Block())
    remedies = find_remedies(estimator(model), model, Policy(default="fp32"), batch_size=2, budget_bytes=1e12)
    assert [(remedy.name, remedy.fits) for remedy in remedies] == [("policy", True)]
