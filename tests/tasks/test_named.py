"""Tasks by name: each small model trains on its data, and what does not go together says what does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from autoprec.errors import TaskError, UsageError
from autoprec.tasks import TaskSource
from autoprec.tasks.batches import count_samples
from autoprec.tasks.named import SMALL_MODELS, named_task


@pytest.mark.parametrize("model", SMALL_MODELS)
def test_a_small_model_learns_a_batch_of_its_data(model: str) -> None:
    if model in ("lstm", "gru", "conv1d"):
        pytest.importorskip("aeon")
    task = named_task(model, batch_size=8, target_batch_size=3)
    torch.manual_seed(0)
    network = task.model()
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
    batch = next(iter(task.train_batches()))
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = task.loss(network, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert all(parameter.grad is not None for parameter in network.parameters())
    assert task.evaluate is not None
    assert 0 <= float(task.evaluate(network, next(iter(task.eval_batches())))[1]) <= 1
    assert task.target is not None
    assert count_samples(task.target.make_batch()) == 3
    assert task.source is not None
    assert task.source.build().settings == task.settings


def test_a_causal_model_does_not_see_what_comes_after() -> None:
    network = SMALL_MODELS["gpt-small"].build().eval()
    tokens = torch.randint(256, (1, 16))
    later = tokens.clone()
    later[0, 8:] = 0
    first, second = network(tokens), network(later)
    assert torch.allclose(first[0, :8], second[0, :8], atol=1e-5)
    assert not torch.allclose(first[0, 8:], second[0, 8:], atol=1e-2)


@pytest.mark.parametrize("model", ["bert-small", "conv1d", "lstm"])
def test_padding_changes_no_answer(model: str) -> None:
    network = SMALL_MODELS[model].build().eval()
    if model == "bert-small":
        tokens = torch.randint(256, (1, 10))
        padded = torch.cat([tokens, torch.full((1, 6), 256)], dim=1)
        short, long = network(tokens, mask=tokens != 256), network(padded, mask=padded != 256)
    else:
        frames, lengths = torch.randn(1, 10, 12), torch.tensor([10])
        short, long = network(frames, lengths), network(torch.cat([frames, torch.zeros(1, 6, 12)], dim=1), lengths)
    tolerance = 0.2 if model == "conv1d" else 1e-5  # its GroupNorm is over all frames, those of the padding too
    assert torch.allclose(short, long, atol=tolerance)


def test_an_own_text_is_told_apart_by_its_content_and_no_path_is_kept(tmp_path: Path) -> None:
    (tmp_path / "corpus").write_bytes(bytes(range(256)) * 40)
    task = named_task("gpt-small", data=f"text:{tmp_path / 'corpus'}", batch_size=4)
    assert str(tmp_path) not in str(task.settings)
    assert task.settings["data_digest"] != named_task("gpt-small", batch_size=4).settings["data_digest"]


def test_one_of_torchvisions_models_is_the_vision_task() -> None:
    task = named_task("resnet18", target_image_size=64, target_batch_size=2)
    assert task.settings["image_size"] == 32
    assert task.target is not None
    assert task.target.description == "2 x 3 x 64 x 64"


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"model": "gpt-smal"}, UsageError, r"torchvision's \d+ .*gpt-small, bert-small.*nearest: gpt-small"),
        ({"model": "mlp", "data": "topics"}, UsageError, "data 'topics' does not go with mlp .*gpt-small, bert-small"),
        ({"model": "resnet18", "data": "breast_cancer"}, UsageError, "does not go with resnet18 .*goes with mlp"),
        ({"model": "gpt-small", "data": "digits"}, UsageError, "allowed: topics, text:PATH.*torchvision's models"),
        ({"model": "mlp", "data": "breast_canser"}, UsageError, "allowed: breast_cancer; nearest"),
        ({"model": "mlp", "image_size": 32}, UsageError, "image_size is 32: mlp takes no images"),
        ({"model": "mlp", "weights": "DEFAULT"}, UsageError, "weights is 'DEFAULT'"),
        ({"model": "mlp", "optimizer": "adamv"}, UsageError, "nearest: adam"),
        ({"model": "mlp", "target_batch_size": 0}, UsageError, "target_batch_size is 0"),
        ({"model": "mlp", "batch_size": 1000}, TaskError, "larger than the 455 training samples"),
    ],
)
def test_a_wrong_name_or_setting_says_what_goes_together(
    settings: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        named_task(**settings)


def test_options_of_a_source_are_those_of_its_task_and_travel_with_it() -> None:
    source = TaskSource("named", {"model": "mlp"}, {"checkpoint": ["0"], "compile": "eager", "accumulation_steps": 2})
    task = source.build()
    assert (task.checkpoint, task.compile, task.accumulation_steps) == (["0"], "eager", 2)
    assert task.source == source
    with pytest.raises(TaskError, match="optimizer_implementation is 'fast'"):
        TaskSource("named", {"model": "mlp"}, {"optimizer_implementation": "fast"}).build()
