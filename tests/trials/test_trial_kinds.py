"""Trials that go wrong: each end has its kind and its evidence."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from small_tasks import cross_entropy, network, small_task
from torch import nn

from autoprec.policy import Policy
from autoprec.trials import TrialSettings, run_trial
from autoprec.trials.aborting import AbortRules

FP32 = Policy(default="fp32")
AUTOCAST = Policy(default="autocast", dtype="fp16")
HALF = Policy(default="fp16")
BF16 = Policy(default="autocast", dtype="bf16")
SHORT = TrialSettings(warmup_steps=2, measured_steps=5, batchnorm_batches=3)


class Overflowing(nn.Module):
    """A wide sum that exceeds FP16's largest value behind two harmless layers (C35)."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.wide = nn.Linear(2048, 1, bias=False)
        nn.init.constant_(self.wide.weight, 1.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.second(self.first(x))
        total = self.wide(torch.full((len(x), 2048), 60.0))
        return y[:, :2] + total * 1e-6


class GradientOverflow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * math.inf if gradient.dtype == torch.float16 else gradient


class OverflowsInBackward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = GradientOverflow.apply(self.inside(x))  # type: ignore[no-untyped-call]
        return y


class IndexPut(nn.Module):
    """Writes half values into an FP32 embedding (C07)."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 2)
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.table(torch.arange(len(x))).clone()
        mask = torch.ones(len(x), dtype=torch.bool)
        h[mask] = self.head(x)
        return h


def conv_batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Normal batches with one of size 1e5 among them, the third (C34)."""
    generator = torch.Generator().manual_seed(0)
    data = [torch.randn(8, 3, 6, generator=generator) for _ in range(5)]
    data[2] = data[2] * 1e5
    return [(x, torch.arange(8) % 2) for x in data]


def conv_network() -> nn.Module:
    return nn.Sequential(nn.Conv1d(3, 16, 3), nn.BatchNorm1d(16), nn.Flatten(), nn.Linear(64, 2))


class TestKinds:
    def test_a_layer_that_overflows_is_named(self) -> None:
        task = small_task(model=Overflowing)
        outcome = run_trial(task, HALF, SHORT)
        assert (outcome.kind, outcome.step) == ("non_finite_loss", 1)
        assert outcome.first_non_finite is not None
        assert outcome.first_non_finite.module == "wide"
        assert "finite input" in outcome.first_non_finite.what
        assert "'wide'" in outcome.message
        assert run_trial(task, Policy(default="fp16", modules={"wide": "fp32"}), SHORT).is_ok
        assert run_trial(task, BF16, SHORT).is_ok

    def test_poisoned_running_statistics_end_the_trial_with_their_name_and_step(self) -> None:
        task = small_task(model=conv_network, train_batches=conv_batches(), eval_batches=conv_batches()[:2])
        outcome = run_trial(task, HALF, SHORT)
        assert (outcome.kind, outcome.step) == ("non_finite_buffer", 3)
        assert "buffer 1.running_mean at step 3" in outcome.message
        assert run_trial(task, FP32, SHORT).is_ok

    def test_more_skipped_steps_than_are_allowed_end_the_trial_at_once(self) -> None:
        rules = AbortRules(max_skip_rate=0.25, max_loss_gap=0.5)
        settings = TrialSettings(warmup_steps=4, measured_steps=12, abort=rules)
        outcome = run_trial(small_task(model=OverflowsInBackward), HALF, settings)
        assert (outcome.kind, outcome.step) == ("aborted", 5)
        assert (outcome.num_steps_taken, outcome.num_steps_skipped, outcome.skip_rate) == (0, 5, 5 / 16)
        assert outcome.message == "5 of 5 steps were skipped; 4 of 16 are allowed"
        assert outcome.first_non_finite is not None
        assert outcome.first_non_finite.module == "inside"

    def test_gradients_that_always_overflow_take_no_step(self) -> None:
        outcome = run_trial(small_task(model=OverflowsInBackward), HALF, SHORT)
        assert outcome.kind == "no_step_taken"
        assert (outcome.num_steps_taken, outcome.num_steps_skipped, outcome.skip_rate) == (0, 7, 1.0)
        assert outcome.grad_norms == [None] * 7
        assert outcome.scale_history == [2.0 ** (16 - n) for n in range(7)]
        assert outcome.first_non_finite is not None
        assert outcome.first_non_finite.module == "inside"

    def test_a_scale_that_runs_down_collapses_with_the_step(self) -> None:
        settings = TrialSettings(warmup_steps=0, measured_steps=60)
        outcome = run_trial(small_task(model=OverflowsInBackward), HALF, settings)
        assert (outcome.kind, outcome.step) == ("scale_collapsed", 31)
        assert "loss scale collapsed at step 31" in outcome.message

    def test_an_operator_that_refuses_half_is_unsupported_and_named(self) -> None:
        outcome = run_trial(small_task(model=IndexPut), AUTOCAST, SHORT)
        assert outcome.kind == "unsupported"
        assert "Index put requires the source and destination dtypes match" in outcome.message
        assert run_trial(small_task(model=IndexPut), FP32, SHORT).is_ok

    def test_a_policy_for_another_model_is_unsupported(self) -> None:
        outcome = run_trial(small_task(), AUTOCAST.replace(modules={"layer9": "fp32"}), SHORT)
        assert outcome.kind == "unsupported"
        assert "layer9" in outcome.message

    def test_the_users_own_error_comes_with_its_traceback_and_no_private_path(self) -> None:
        def loss(model: nn.Module, batch: Any) -> torch.Tensor:
            return model(batch[0].flatten())

        outcome = run_trial(small_task(loss=loss), FP32, SHORT)
        assert (outcome.kind, outcome.step) == ("user_error", 1)
        assert "mat1 and mat2 shapes" in outcome.message or "size mismatch" in outcome.message
        assert "in module '0'" in outcome.message
        assert "return model(batch[0].flatten())" in outcome.traceback
        assert str(Path(__file__).parent) not in outcome.traceback

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"model": lambda: 3}, r"model\(\) returned int"),
            ({"model": lambda: network().requires_grad_(False)}, "no parameter of Sequential is trainable"),
            ({"train_batches": []}, "there are 0 training batches"),
            ({"eval_batches": []}, "there are 0 held-out batches"),
            ({"train_batches": 5}, "train_batches is int"),
            ({"loss": lambda m, b: 1.0}, "the loss is float"),
            ({"loss": lambda m, b: m(b[0])}, r"the loss is Tensor of shape \(8, 2\)"),
            ({"loss": lambda m, b: cross_entropy(m, b).detach()}, "the loss has no gradient"),
            ({"metric": lambda m, b: "good"}, "the metric returned str"),
            ({"optimizer": torch.optim.LBFGS}, "LBFGS evaluates the loss in a closure"),
            ({"optimizer": lambda p: None}, r"optimizer\(\) returned NoneType"),
            ({"metric": lambda m, b: math.nan}, "accuracy is nan on the held-out data"),
        ],
        ids=lambda value: "" if isinstance(value, dict) else value[:24],
    )
    def test_a_wrong_task_is_a_user_error_with_one_clear_message(self, changes: dict[str, Any], message: str) -> None:
        outcome = run_trial(small_task(**changes), FP32, SHORT)
        assert outcome.kind == "user_error"
        assert re.search(message, outcome.message), outcome.message

    def test_a_metric_that_is_nan_only_in_low_precision_is_a_result(self) -> None:
        def metric(model: nn.Module, batch: Any) -> float:
            return math.nan if model(batch[0]).dtype != torch.float32 else 1.0

        outcome = run_trial(small_task(metric=metric), AUTOCAST, SHORT)
        assert outcome.is_ok  # the evaluation itself is in FP32
        nan = run_trial(small_task(metric=lambda m, b: math.nan), AUTOCAST, SHORT)
        assert nan.kind == "non_finite_loss"
        json.dumps(nan.model_dump(mode="json"), allow_nan=False)

    def test_fp32_divergence_is_a_result_without_nan(self) -> None:
        def loss(model: nn.Module, batch: Any) -> torch.Tensor:
            return cross_entropy(model, batch) * math.inf

        outcome = run_trial(small_task(loss=loss), FP32, SHORT)
        assert outcome.kind == "non_finite_loss"
        assert outcome.train_losses == []
        json.dumps(outcome.model_dump(mode="json"), allow_nan=False)
