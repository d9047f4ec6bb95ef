"""Read-only tensors that half cannot hold stay FP32 where the module's code can work so, else one warning says so."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torchvision.ops import FrozenBatchNorm2d

import autoprec
from autoprec.apply import check_fit
from autoprec.errors import PrecisionWarning
from autoprec.policy import Policy

HALVES = ("fp16", "bf16")


class Masked(nn.Module):
    """Scores with an additive mask, without a product of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.register_buffer("mask", torch.full((4, 4), -1e9).triu(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.softmax(self.body(x) + self.mask + self.mask, dim=-1)


class Attention(nn.Module):
    """The mask meets a product of half tensors: the module's code takes one dtype alone."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(4, 4)
        self.register_buffer("mask", torch.full((4, 4), -1e9).triu(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        value = self.project(x)
        return F.softmax(value @ value.mT + self.mask, dim=-1) @ value


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(5000.0))
        self.offsets = torch.arange(5000.0)
        self.frozen = nn.Parameter(torch.arange(5000.0), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.cos(self.table) + torch.cos(self.offsets) + torch.cos(self.frozen)


@pytest.mark.parametrize("half", HALVES)
def test_a_mask_that_half_turns_into_nan_stays_fp32(half):
    torch.manual_seed(0)
    model = nn.Sequential(Masked(), nn.Linear(4, 2))
    x = torch.randn(4, 4)
    expected = model(x)
    autoprec.apply_policy(model, Policy(default=half))
    with autoprec.emulate():
        found = model(x)
    assert torch.allclose(found, expected, atol=2e-2)


@pytest.mark.parametrize("half", HALVES)
def test_whole_numbers_that_half_would_change_stay_as_they_are(half):
    model = nn.Sequential(Positions())
    expected = model(torch.zeros(5000))
    autoprec.apply_policy(model, Policy(default=half))
    with autoprec.emulate():
        found = model(torch.zeros(5000))
    assert torch.allclose(found, expected, atol=2e-2)  # the output alone is rounded


def test_the_statistics_of_a_frozen_batch_norm_stay_fp32():
    norm = FrozenBatchNorm2d(2)
    norm.running_var.copy_(torch.tensor([3e-9, 1e6]))
    norm.running_mean.copy_(torch.tensor([0.123456, 1000.3]))
    x = torch.randn(2, 2, 3, 3)
    x[:, 1] = x[:, 1] * 1000 + 1000
    expected = norm(x)
    model = autoprec.apply_policy(nn.Sequential(norm), Policy(default="fp16"))
    with autoprec.emulate():
        found = model(x)
    assert torch.allclose(found, expected, rtol=2e-2, atol=2e-2)


def test_a_mask_that_a_product_meets_is_told_once_with_the_rule_that_helps():
    def build() -> nn.Module:
        return nn.Sequential(*(Attention() for _ in range(6)))

    with pytest.warns(PrecisionWarning) as told:
        autoprec.apply_policy(build(), Policy(default="fp16"))
    texts = [str(each.message) for each in told]
    assert len(texts) == 1
    assert "0.mask (-1e+09 becomes -inf in fp16): give '0' autocast or fp32" in texts[0]
    assert "and 2 more" in texts[0]
    torch.manual_seed(0)
    model = build()
    x = torch.randn(4, 4)
    expected = model(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error", PrecisionWarning)
        autoprec.apply_policy(model, Policy(default="fp16", modules={"*": "autocast"}))
    with autoprec.emulate():
        assert torch.allclose(model(x), expected, atol=2e-2)


def test_the_fit_of_a_policy_tells_the_mask_too():
    fit = check_fit(nn.Sequential(Attention()), Policy(default="fp16"))
    assert fit.fits
    assert any("0.mask" in note for note in fit.notes)


def test_tensors_that_half_holds_are_cast_as_before():
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.full((4,), 0.1))
            self.register_buffer("steps", torch.arange(4.0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.dtypes = (self.scale.dtype, self.steps.dtype)
            return x * self.scale + self.steps

    model = autoprec.apply_policy(Scaled(), Policy(default="bf16"))
    model(torch.ones(4))
    assert model.dtypes == (torch.bfloat16, torch.bfloat16)


def test_tensors_without_values_are_not_looked_at():
    with torch.device("meta"):
        model = nn.Sequential(Masked())
    autoprec.apply_policy(model, Policy(default="bf16"))
    assert model(torch.randn(4, 4, device="meta")).shape == (4, 4)


def test_a_written_buffer_that_meets_half_tensors_is_named_in_the_error():
    class Queue(nn.Module):
        """MoCo's queue of keys: what comes out is appended to it."""

        def __init__(self) -> None:
            super().__init__()
            self.project = nn.Linear(4, 4)
            self.register_buffer("queue", torch.randn(4, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            keys = self.project(x)
            logits = keys @ self.queue
            self.queue[:, : len(keys)] = keys.detach().T
            return logits

    model = autoprec.apply_policy(Queue(), Policy(default="bf16"))
    with pytest.raises(RuntimeError) as raised:
        model(torch.randn(2, 4))
    assert any("Queue keeps queue in FP32 in a half region" in note for note in raised.value.__notes__)
    autoprec.remove_policy(model)
    autoprec.apply_policy(model, Policy(default="autocast", dtype="bf16"))
    assert model(torch.randn(2, 4)).shape == (2, 8)
