"""Situations that people have reported, as trials: what half arithmetic does to masks and constants, and to metrics."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import pytest
import torch
from small_tasks import small_task
from torch import nn

from autoprec.apply.portability import has_native_bf16
from autoprec.errors import TaskError
from autoprec.policy import Policy
from autoprec.search.runner import require_reference
from autoprec.trials import TrialSettings, run_trial

FP32 = Policy(default="fp32")
SHORT = TrialSettings(warmup_steps=1, measured_steps=2, batchnorm_batches=1)


class Attention(nn.Module):
    """Scores of four tokens with the mask of a padded batch, one row of which is masked throughout."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores, masked = x * self.scale, torch.zeros(x.shape, dtype=torch.bool, device=x.device)
        masked[0] = True
        if self.how == "filled with -1e9":
            scores = scores.masked_fill(masked, -1e9)
        elif self.how == "two masks added":
            mask = masked.to(scores.dtype) * -4e4
            scores = scores + mask + mask  # each fits into FP16, their sum is -inf there
        else:
            return torch.log(torch.relu(scores) + 1e-8) * self.scale
        return scores.softmax(-1)


def network(how: str) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), Attention(how), nn.Linear(4, 2))


@pytest.mark.parametrize(
    ("how", "dtype", "kind"),
    [
        ("filled with -1e9", "fp16", "unsupported"),
        ("filled with -1e9", "bf16", "ok"),
        ("two masks added", "fp16", "non_finite_loss"),
        ("two masks added", "bf16", "ok"),
        ("a logarithm of 1e-8", "fp16", "non_finite_loss"),
        ("a logarithm of 1e-8", "bf16", "ok"),
    ],
)
def test_c36_masks_and_constants_in_half_end_the_trial_with_the_module(how: str, dtype: Any, kind: str) -> None:
    task = small_task(model=lambda: network(how))
    outcome = run_trial(task, Policy(default=dtype, dtype=dtype), SHORT)
    assert outcome.kind == kind, outcome.message
    if kind == "unsupported":
        assert "in module '1'" in outcome.message
    if kind == "non_finite_loss":
        assert outcome.first_non_finite is not None
        assert outcome.first_non_finite.module == "1"
    assert run_trial(task, Policy(default=dtype, dtype=dtype, modules={"1": "fp32"}), SHORT).is_ok


def test_c46_a_metric_that_is_nan_in_fp32_too_stops_with_its_name() -> None:
    outcome = run_trial(small_task(metric=lambda model, batch: math.nan, metric_name="auroc"), FP32, SHORT)
    assert outcome.kind == "user_error"
    with pytest.raises(TaskError, match="auroc is nan on the held-out data while the loss is finite"):
        require_reference(outcome)


def test_c43_bf16_that_a_card_emulates_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """A T4 answers the plain question with yes."""
    asked: list[bool] = []

    def is_supported(including_emulation: bool = True) -> bool:
        asked.append(including_emulation)
        return including_emulation

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", is_supported)
    assert not has_native_bf16(torch.device("cuda"))
    assert asked == [False]
