"""Evaluation: every sample counts once; BatchNorm statistics are the plain mean over the batches shown."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_tasks import batches, cross_entropy, network, share_correct, small_task
from torch import nn

from autoprec.errors import TaskError
from autoprec.policy import Policy
from autoprec.trials import TrialSettings, run_trial
from autoprec.trials.evaluation import estimate_batchnorm, evaluate

CPU = torch.device("cpu")


def test_loss_and_metric_are_weighted_by_the_size_of_each_batch() -> None:
    inputs, labels = torch.randn(9, 4), torch.randint(0, 2, (9,))
    model = nn.Linear(4, 2)
    parts = [(inputs[:8], labels[:8]), (inputs[8:], labels[8:])]
    result = evaluate(model, small_task(eval_batches=parts), device=CPU)
    assert result.num_samples == 9
    assert result.loss == pytest.approx(cross_entropy(model, (inputs, labels)).item(), rel=1e-6)
    assert result.metric == pytest.approx(float(share_correct(model, (inputs, labels))), rel=1e-6)


def test_one_forward_serves_both_where_the_task_says_how() -> None:
    calls = []

    def both(model: nn.Module, batch: Any) -> tuple[torch.Tensor, float]:
        calls.append(1)
        return cross_entropy(model, batch), 0.25

    result = evaluate(nn.Linear(4, 2), small_task(evaluate=both), device=CPU)
    assert (result.metric, len(calls)) == (0.25, 6)


def test_a_metric_to_minimize_is_negated_and_no_metric_means_the_loss() -> None:
    model = nn.Linear(4, 2)
    error = evaluate(model, small_task(metric=lambda m, b: 3.0, metric_direction="minimize"), device=CPU)
    assert error.metric == -3.0
    plain = evaluate(model, small_task(metric=None), device=CPU)
    assert plain.metric == pytest.approx(-plain.loss)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({}, "accuracy"),
        ({"metric": None}, "held-out loss, negated"),
        ({"metric_name": "auroc"}, "auroc"),
        ({"metric_name": "error", "metric_direction": "minimize"}, "error, negated"),
        ({"metric": None, "evaluate": print}, "accuracy"),
    ],
    ids=["a metric", "none", "another name", "to minimize", "evaluate alone"],
)
def test_what_stands_behind_the_accuracy_of_a_study_is_said(changes: dict[str, Any], name: str) -> None:
    assert small_task(**changes).accuracy_name == name


def test_the_model_gets_back_the_mode_of_every_module() -> None:
    model = network().train()
    model[1].eval()  # type: ignore[index]
    evaluate(model, small_task(), device=CPU)
    assert [module.training for module in model] == [True, False, True, True]  # type: ignore[union-attr]


def test_batchnorm_statistics_are_the_mean_over_the_batches() -> None:
    model = network()
    data = batches(0)[:3]
    hidden = [model[0](x).detach() for x, _ in data]  # type: ignore[index]
    assert estimate_batchnorm(model, small_task(), iter(data)) == 1
    norm = model[1]  # type: ignore[index]
    torch.testing.assert_close(norm.running_mean, torch.stack([h.mean(0) for h in hidden]).mean(0))
    torch.testing.assert_close(norm.running_var, torch.stack([h.var(0) for h in hidden]).mean(0))
    assert norm.momentum == 0.1
    assert norm.training


def test_without_batches_the_running_statistics_stay() -> None:
    model = network()
    before = model[1].running_mean.clone()  # type: ignore[index,union-attr,operator]
    assert estimate_batchnorm(model, small_task(), []) == 0
    assert torch.equal(model[1].running_mean, before)  # type: ignore[index,arg-type]


@pytest.mark.parametrize(("under_policy", "dtype"), [(False, torch.float32), (True, torch.float16)])
def test_evaluation_is_in_fp32_unless_asked_for_under_the_policy(under_policy: bool, dtype: torch.dtype) -> None:
    seen: set[torch.dtype] = set()

    class Watched(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x)
            if not self.training:
                seen.add(y.dtype)
            return y

    task = small_task(model=lambda: nn.Sequential(Watched(4, 2)))
    settings = TrialSettings(warmup_steps=0, measured_steps=2, evaluate_under_policy=under_policy)
    assert run_trial(task, Policy(default="autocast", dtype="fp16"), settings).is_ok
    assert seen == {dtype}


class Detector(nn.Module):
    """Losses in training mode, predictions in evaluation mode, as torchvision's detectors."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.9), nn.Linear(8, 2))

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        scores = self.body(x)
        return {"loss": nn.functional.cross_entropy(scores, labels)} if self.training else scores


def test_a_model_with_losses_in_training_mode_alone_gets_its_statistics() -> None:
    torch.manual_seed(0)
    model = Detector().train()
    model.body[3].eval()
    inputs = torch.randn(16, 4)
    task = small_task(loss=lambda model, batch: model(*batch)["loss"])
    assert estimate_batchnorm(model, task, [(inputs, torch.zeros(16, dtype=torch.long))]) == 1
    norm = model.body[1]
    assert torch.allclose(norm.running_mean, model.body[0](inputs).mean(0), atol=1e-6)
    assert torch.allclose(norm.running_var, model.body[0](inputs).var(0), atol=1e-6)
    assert [module.training for module in (model, model.body[2], norm)] == [True] * 3
    assert not model.body[3].training
    assert norm.momentum == 0.1


def test_dropout_is_off_while_statistics_are_estimated() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Dropout(0.5), nn.BatchNorm1d(4), nn.Linear(4, 2))
    inputs = torch.randn(16, 4)
    estimate_batchnorm(model, small_task(), [(inputs, torch.zeros(16, dtype=torch.long))])
    assert torch.allclose(model[1].running_mean, inputs.mean(0), atol=1e-6)


def test_a_held_out_batch_with_a_number_that_is_none_is_named() -> None:
    parts = [(torch.randn(8, 4), torch.zeros(8, dtype=torch.long)) for _ in range(3)]
    parts[2][0][1, 1] = torch.inf
    message = r"held-out batch 3 holds 1 inf in its tensor 1 \(8x4 float32\)"
    with pytest.raises(TaskError, match=message):
        evaluate(nn.Linear(4, 2), small_task(eval_batches=parts), device=CPU)
