"""Memory of a step with the options that a task can ask for: checkpointing, accumulation, optimizer implementations."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autoprec.apply import checkpoint_modules
from autoprec.estimates import StepSettings, peak_memory, real_peak, record_step
from autoprec.policy import Policy

MIB = 2**20
POLICIES = {
    "fp32": Policy(default="fp32"),
    "autocast": Policy(default="autocast"),
    "fp16": Policy(default="fp16"),
}


class Block(nn.Module):
    """Saves its input (.25 MiB at 256 rows) and two activations of 1 MiB each, and a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.expand = nn.Linear(256, 1024)
        self.dropout = nn.Dropout(0.1)
        self.shrink = nn.Linear(1024, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.shrink(self.dropout(nn.functional.gelu(self.expand(x))))


def stack(*, checkpointed: bool, num_blocks: int = 6) -> nn.Module:
    model = nn.Sequential(*(Block() for _ in range(num_blocks)))
    if checkpointed:
        checkpoint_modules(model, ["*"])
    return model


def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def saved(model: nn.Module, rows: int) -> int:
    recording = record_step(model, torch.zeros(rows, 256), loss, settings=StepSettings(optimizer=torch.optim.SGD))
    return sum(peak_memory(recording, rounding_bytes=1).saved_by_unit.values())


def test_a_checkpointed_block_keeps_its_input_alone() -> None:
    """At 256 rows a block's input of .25 MiB is what the block before hands over: 6 outputs and one square stay."""
    plain, checkpointed = saved(stack(checkpointed=False), 256), saved(stack(checkpointed=True), 256)
    assert plain >= 6 * 2 * MIB
    assert 6 * MIB // 4 <= checkpointed <= 2 * MIB


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_the_computed_peak_falls_and_equals_the_real_one_within_a_percent(policy: Policy) -> None:
    settings = StepSettings(policy=policy, optimizer=torch.optim.SGD, as_on_cuda=False)
    batch = torch.randn(512, 256)
    peaks = {}
    for checkpointed in (False, True):
        model = stack(checkpointed=checkpointed, num_blocks=3)
        computed = peak_memory(record_step(model, batch, loss, settings=settings), rounding_bytes=1).peak_bytes
        real = real_peak(model, batch, loss, settings=settings).peak_bytes
        assert computed == pytest.approx(real, rel=0.01)
        peaks[checkpointed] = computed
    assert peaks[True] < 0.9 * peaks[False]


def test_accumulation_takes_the_gradients_through_the_second_forward() -> None:
    """With a second micro-batch, the gradients of all blocks may stand while activations are made."""
    model = stack(checkpointed=False)
    gradients = sum(p.numel() for p in model.parameters()) * 4
    one, two = (
        peak_memory(
            record_step(
                model,
                torch.zeros(2048, 256),
                loss,
                settings=StepSettings(optimizer=torch.optim.SGD, foreach=False, accumulation_steps=steps),
            ),
            rounding_bytes=1,
        ).peak_bytes
        for steps in (1, 2)
    )
    assert one < two <= one + gradients + 4 * MIB


@pytest.mark.parametrize("implementation", ["foreach", "fused", "for-loop"])
def test_an_implementations_temporaries_are_counted(implementation: str) -> None:
    keywords = {"foreach": {"foreach": True}, "fused": {"fused": True}, "for-loop": {"foreach": False}}[implementation]
    model = stack(checkpointed=False, num_blocks=2)
    settings = StepSettings(optimizer=torch.optim.AdamW, optimizer_settings=keywords)
    peak = peak_memory(record_step(model, torch.zeros(1, 256), loss, settings=settings), rounding_bytes=1)
    weights = sum(p.numel() for p in model.parameters()) * 4
    temporaries = {"foreach": weights, "fused": 0, "for-loop": 2 * 256 * 1024 * 4}[implementation]
    assert peak.by_category["temporaries"] == pytest.approx(temporaries, abs=MIB // 8)
