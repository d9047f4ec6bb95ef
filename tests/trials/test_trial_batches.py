"""Batches of every shape and number through a whole trial (C50, C20, C22, C23)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from small_tasks import batches, cross_entropy, network, share_correct, small_task
from torch import nn
from torch.nn.parameter import UninitializedParameter
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from autoprec.policy import Policy
from autoprec.tasks import Task
from autoprec.tasks.batches import move_batch
from autoprec.trials import TrialSettings, run_trial
from autoprec.trials.evaluation import evaluate

FP32 = Policy(default="fp32")
HALF = Policy(default="autocast", dtype="fp16")
SHORT = TrialSettings(warmup_steps=2, measured_steps=4, batchnorm_batches=2)


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


@dataclasses.dataclass(frozen=True)
class Record:
    x: torch.Tensor
    y: torch.Tensor
    name: str = "a record"


class Labelled(dict[str, Any]):
    """A mapping of a class of its own."""


SHAPES: dict[str, tuple[Any, Any]] = {
    "tuple": (lambda x, y: (x, y), lambda b: b),
    "dict": (lambda x, y: {"x": x, "y": y, "ids": ["a"]}, lambda b: (b["x"], b["y"])),
    "mapping": (lambda x, y: Labelled(x=x, y=y), lambda b: (b["x"], b["y"]) if type(b) is Labelled else None),
    "named tuple": (Pair, lambda b: (b.x, b.y) if isinstance(b, Pair) else None),
    "dataclass": (Record, lambda b: (b.x, b.y) if b.name == "a record" else None),
    "nested": (lambda x, y: {"in": (x, None), "out": [y]}, lambda b: (b["in"][0], b["out"][0])),
    "one tensor": (lambda x, y: torch.cat([x, y[:, None].float()], 1), lambda b: (b[:, :4], b[:, 4].long())),
}


@pytest.mark.parametrize(("pack", "unpack"), SHAPES.values(), ids=SHAPES)
def test_a_batch_of_any_shape_gives_the_same_training(pack: Any, unpack: Any) -> None:
    def packed(seed: int) -> list[Any]:
        return [pack(x, y) for x, y in batches(seed)]

    task = small_task(
        train_batches=packed(0),
        eval_batches=packed(1),
        loss=lambda model, batch: cross_entropy(model, unpack(batch)),
        metric=lambda model, batch: share_correct(model, unpack(batch)),
    )
    outcome, reference = (run_trial(each, HALF, SHORT) for each in (task, small_task()))
    assert outcome.is_ok, outcome.message
    assert outcome.train_losses == reference.train_losses
    assert outcome.accuracy == reference.accuracy


def test_batches_without_labels_train() -> None:
    def reconstruct(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(model(x), x)

    data = [x for x, _ in batches(0)]
    task = small_task(
        model=lambda: nn.Linear(4, 4), train_batches=data, eval_batches=data, loss=reconstruct, metric=None
    )
    outcome = run_trial(task, HALF, SHORT)
    assert outcome.is_ok, outcome.message
    assert outcome.accuracy is not None
    assert outcome.eval_loss is not None
    assert outcome.accuracy.value == -outcome.eval_loss.value


class Endless(IterableDataset[Any]):
    """Five samples and no length."""

    def __iter__(self) -> Iterator[Any]:
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
        yield from [(each, torch.tensor(index % 2)) for index, each in enumerate(x)]


def test_a_loader_of_five_items_without_a_length_serves_twenty_steps() -> None:
    task = small_task(train_batches=DataLoader(Endless(), batch_size=2))
    outcome = run_trial(task, FP32, TrialSettings(warmup_steps=0, measured_steps=20, batchnorm_batches=1))
    assert outcome.is_ok, outcome.message
    assert outcome.num_steps_taken == 20
    assert outcome.notes == ["a training batch of one sample was left out: normalisation needs at least two"]


def test_nine_samples_by_eight_train_on_eight_and_are_judged_on_nine() -> None:
    x = torch.randn(9, 4, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, (x.sum(1) > 0).long())
    loader = DataLoader(data, batch_size=8)
    task = small_task(train_batches=loader, eval_batches=loader)
    outcome = run_trial(task, FP32, SHORT)
    assert outcome.is_ok, outcome.message
    torch.manual_seed(0)
    model = network()
    by_parts = evaluate(model, task, device=torch.device("cpu"))
    model.eval()
    assert by_parts.num_samples == 9
    assert by_parts.loss == pytest.approx(cross_entropy(model, data.tensors).item(), rel=1e-6)
    assert by_parts.metric == pytest.approx(share_correct(model, data.tensors).item())


def test_tensors_that_are_in_place_are_neither_moved_nor_pinned() -> None:
    batch = {"x": torch.zeros(2, 3), "deep": (torch.ones(1),)}
    moved = move_batch(batch, torch.device("cpu"))
    assert moved is batch
    assert not moved["x"].is_pinned()


def sequences(*lengths: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(0, 50, (4, length), generator=generator) for length in lengths]
    return [(each, each[:, 0] % 2) for each in ids]


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 16)
        self.mix = nn.Linear(16, 16)
        self.head = nn.Linear(16, 2)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.mix(self.table(ids))).mean(1))


def text_task(*lengths: int, **changes: Any) -> Task:
    data = sequences(*lengths)
    return small_task(model=Tagger, train_batches=data, eval_batches=data, **changes)


@pytest.mark.parametrize("kind", ["list", "loader"])
def test_memory_is_that_of_the_longest_batch(kind: str) -> None:
    def peak(*lengths: int) -> float:
        task = text_task(*lengths)
        if kind == "loader":
            task = small_task(
                model=Tagger, train_batches=lambda: iter(sequences(*lengths)), eval_batches=sequences(*lengths)
            )
        outcome = run_trial(task, FP32, SHORT)
        assert outcome.is_ok, outcome.message
        assert outcome.peak_memory_bytes is not None
        return outcome.peak_memory_bytes.value

    assert peak(8, 64, 512, 16) == peak(512) > 2 * peak(8)


def test_throughput_is_told_in_tokens_where_the_task_counts_them() -> None:
    task = text_task(8, 32, num_tokens=lambda batch: batch[0].numel())
    outcome = run_trial(task, FP32, SHORT)
    assert outcome.throughput_samples_per_second is not None
    assert outcome.throughput_tokens_per_second is not None
    per_sample = outcome.throughput_tokens_per_second.value / outcome.throughput_samples_per_second.value
    assert per_sample == pytest.approx(32)
    assert outcome.throughput_tokens_per_second.kind == "predicted"
    assert run_trial(text_task(8), FP32, SHORT).throughput_tokens_per_second is None


def test_samples_are_counted_by_the_task_where_the_first_dimension_is_time() -> None:
    data = [(torch.randn(16, 2, 4), torch.tensor([0, 1]))]
    changes: dict[str, Any] = {
        "model": lambda: nn.Linear(4, 2),
        "train_batches": data,
        "eval_batches": data,
        "loss": lambda model, batch: nn.functional.cross_entropy(model(batch[0]).mean(0), batch[1]),
        "metric": None,
    }
    by_time = run_trial(small_task(**changes), FP32, SHORT).throughput_samples_per_second
    by_sample = run_trial(small_task(**changes, num_samples=lambda b: 2), FP32, SHORT).throughput_samples_per_second
    assert by_time is not None
    assert by_sample is not None
    assert by_time.value / by_sample.value == pytest.approx(8)


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_a_lazy_model_trains_as_the_eager_one_and_takes_nothing_from_an_iterator() -> None:
    def lazy() -> nn.Module:
        model = nn.Sequential(nn.LazyLinear(16), nn.LazyBatchNorm1d(), nn.ReLU(), nn.LazyLinear(2))
        assert isinstance(model[0].weight, UninitializedParameter)
        return model

    outcome = run_trial(small_task(model=lazy, train_batches=iter(batches(0))), FP32, SHORT)
    assert outcome.is_ok, outcome.message
    assert outcome.train_losses == run_trial(small_task(), FP32, SHORT).train_losses


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 8)
        self.heads = nn.ModuleList([nn.Linear(8, 2), nn.Linear(8, 2)])
        self.calls = 0

    def forward(self, x: torch.Tensor, head: int) -> torch.Tensor:
        out: torch.Tensor = self.heads[head](torch.relu(self.body(x)))
        return out


@pytest.mark.parametrize("alternates", [False, True], ids=["unused head", "alternate heads"])
def test_an_optimizer_whose_parameters_get_no_gradient_is_left_out_of_the_step(alternates: bool) -> None:
    step = 0

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        nonlocal step
        step += model.training
        return nn.functional.cross_entropy(model(batch[0], step % 2 if alternates else 0), batch[1])

    def optimizers(parameters: Any) -> list[torch.optim.Optimizer]:
        body, head, other = parameters[:2], parameters[2:4], parameters[4:]
        return [torch.optim.SGD(each, lr=0.1) for each in (body, head, other)]

    outcome = run_trial(small_task(model=TwoHeads, loss=loss, metric=None, optimizer=optimizers), HALF, SHORT)
    assert outcome.is_ok, outcome.message
    assert (outcome.num_steps_taken, outcome.num_steps_skipped) == (6, 0)


def test_accumulation_with_clipping_equals_a_plain_loop_over_seven_batches() -> None:
    data = batches(0, num_batches=7)
    sgd = {"optimizer": torch.optim.SGD, "optimizer_settings": {"lr": 0.5}}
    task = small_task(train_batches=data, accumulation_steps=4, max_grad_norm=0.1, **sgd)
    outcome = run_trial(task, FP32, TrialSettings(warmup_steps=0, measured_steps=3, batchnorm_batches=1))
    torch.manual_seed(0)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for window in ([0, 1, 2, 3], [4, 5, 6, 0], [1, 2, 3, 4]):
        optimizer.zero_grad()
        each = [cross_entropy(model, data[index]) for index in window]
        torch.stack(each).mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        losses.append(sum(loss.item() for loss in each) / 4)
    assert outcome.train_losses == pytest.approx(losses, abs=1e-6)
    assert outcome.num_steps_taken == 3
