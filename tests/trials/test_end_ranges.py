"""The watched step at trained weights: its ranges are those of the pass, and the run stays what it is."""

from __future__ import annotations

import pytest
import torch
from small_tasks import batches, comparable, cross_entropy, small_task
from torch import nn

from autoprec.policy import Policy
from autoprec.trials import TrialSettings, run_trial
from autoprec.trials.end_ranges import watch_end

FP32 = Policy(default="fp32")
SHORT = TrialSettings(warmup_steps=2, measured_steps=5, batchnorm_batches=3)


def test_the_run_is_the_same_with_it() -> None:
    plain, watched = (
        run_trial(small_task(), FP32, SHORT),
        run_trial(small_task(), FP32, SHORT.model_copy(update={"watch_end": True})),
    )
    assert plain.end_ranges is None
    assert watched.end_ranges is not None
    assert comparable(watched.model_copy(update={"end_ranges": None})) == comparable(plain)


def test_ranges_are_those_of_one_pass_by_hand() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
    batch = batches(0)[0]
    found = watch_end(model, small_task(), batch)
    first = model[0](batch[0])
    assert found.largest_activation == pytest.approx(
        max(first.detach().abs().max().item(), model(batch[0]).detach().abs().max().item())
    )
    assert found.module in ("0", "2")
    cross_entropy(model, batch).backward()
    largest = max([float(p.grad.abs().max()) for p in model.parameters() if p.grad is not None])
    assert found.gradients.maximum >= largest - 1e-7
    assert not model[0]._forward_hooks
