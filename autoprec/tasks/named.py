"""A task by the names of its model and data: what `autoprec search --model NAME --data NAME` trains."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from autoprec.errors import UsageError, did_you_mean
from autoprec.tasks.epochs import EpochBatches
from autoprec.tasks.protocol import TargetShape, Task
from autoprec.tasks.small_networks import ByteTransformer, ConvolutionalClassifier, RecurrentClassifier, build_mlp
from autoprec.tasks.source import TaskSource
from autoprec.tasks.speech import NUM_FEATURES, NUM_SPEAKERS, SPEECH_NAMES, speech_batches
from autoprec.tasks.tabular import NUM_COLUMNS, TABULAR_NAMES, tabular_batches
from autoprec.tasks.text import NUM_BYTES, TEXT_NAMES, language_batches, load_text, topic_batches

__all__ = ["SMALL_MODELS", "named_task"]

LENGTH = 128
"""Bytes of a text sample."""
NUM_TOPICS = 8

Splits = tuple[EpochBatches, EpochBatches]


@dataclass(frozen=True, slots=True)
class _Kind:
    """One small model: how it is built, the data it takes, and how its batches are made and judged."""

    build: Callable[[], nn.Module]
    data: Sequence[str]
    batches: Callable[[str, int, int], Splits]
    evaluate: Callable[[nn.Module, Any], tuple[torch.Tensor, torch.Tensor]]
    shape: str


def named_task(
    model: str = "resnet50",
    *,
    data: str | None = None,
    weights: str | None = None,
    image_size: int | None = None,
    batch_size: int = 32,
    optimizer: str = "adamw",
    lr: float = 1e-3,
    seed: int = 0,
    target_image_size: int | None = None,
    target_batch_size: int = 128,
) -> Task:
    """Describe the training of a model by name: one of torchvision's classifiers, or a small one for other data.

    Args:
        model: torchvision's, or `gpt-small` and `bert-small` on text, `lstm`, `gru` and `conv1d` on speech, `mlp` on a
            table.
        data: None takes the first that goes with the model (`digits`, `topics`, `japanese_vowels`, `breast_cancer`).
        image_size, target_image_size: for images alone; None takes 32 and 224.
        weights, batch_size, optimizer, lr, seed, target_batch_size: as `vision_task`.

    Raises:
        UsageError: an unknown name, with the nearest; data or a setting that does not go with the model.
        TaskError: the data or weights are missing or do not fit.
    """
    from autoprec.tasks.networks import MODEL_NAMES
    from autoprec.tasks.vision import vision_task

    if model in MODEL_NAMES:
        _check_data(model, data, images=True)
        return vision_task(
            model,
            weights=weights,
            data=data or "digits",
            image_size=32 if image_size is None else image_size,
            batch_size=batch_size,
            optimizer=optimizer,
            lr=lr,
            seed=seed,
            target_image_size=224 if target_image_size is None else target_image_size,
            target_batch_size=target_batch_size,
        )
    if model not in SMALL_MODELS:
        raise UsageError(
            f"model {model!r}: not one of torchvision's {len(MODEL_NAMES)} classification models and not"
            f" {', '.join(SMALL_MODELS)}{did_you_mean(model, [*MODEL_NAMES, *SMALL_MODELS])}"
        )
    for name, value in (("weights", weights), ("image_size", image_size), ("target_image_size", target_image_size)):
        if value is not None:
            raise UsageError(f"{name} is {value!r}: {model} takes no images; leave it out")
    _check_data(model, data, images=False)
    return _small_task(model, data, batch_size, optimizer, lr, seed, target_batch_size)


def _check_data(model: str, data: str | None, *, images: bool) -> None:
    """Refuse data of another kind than the model's; names that are of no kind are left to the loaders."""
    from autoprec.tasks.images import DATA_NAMES

    if data is None:
        return
    own = DATA_NAMES if images else SMALL_MODELS[model].data
    name = data.partition(":")[0]
    takers = [small for small, kind in SMALL_MODELS.items() if name in _plain(kind.data)]
    if name in _plain(own) or not (takers or name in _plain(DATA_NAMES)):
        return
    where = f"{', '.join(takers)}" if takers else "torchvision's models"
    raise UsageError(f"data {name!r} does not go with {model} (allowed: {', '.join(own)}); it goes with {where}")


def _plain(names: Sequence[str]) -> list[str]:
    return [name.partition(":")[0] for name in names]


def _small_task(
    model: str, data: str | None, batch_size: int, optimizer: str, lr: float, seed: int, target_batch_size: int
) -> Task:
    from autoprec.tasks.vision import optimizer_of

    kind = SMALL_MODELS[model]
    chosen, chosen_settings = optimizer_of(optimizer, lr)
    if target_batch_size < 1:
        raise UsageError(f"target_batch_size is {target_batch_size}; at least 1")
    data = data or _plain(kind.data)[0]
    train, held_out = kind.batches(data, batch_size, seed)
    arguments = {
        "model": model,
        "data": data,
        "batch_size": batch_size,
        "optimizer": optimizer,
        "lr": lr,
        "seed": seed,
        "target_batch_size": target_batch_size,
    }
    settings = {key: value for key, value in arguments.items() if key != "data"}
    is_text = data.partition(":")[0] in _plain(TEXT_NAMES)
    return Task(
        name=model,
        model=kind.build,
        train_batches=train,
        eval_batches=held_out,
        loss=_Loss(kind.evaluate),
        evaluate=kind.evaluate,
        optimizer=chosen,
        optimizer_settings=chosen_settings,
        max_grad_norm=1.0,
        target=TargetShape(
            make_batch=partial(train.first, target_batch_size),
            batch_size=target_batch_size,
            description=f"{target_batch_size} x {kind.shape}",
        ),
        settings=settings
        | {"data": data.partition(":")[0]}
        | ({"data_digest": load_text(data).digest} if is_text else {}),
        source=TaskSource("named", arguments),
    )


@dataclass(frozen=True, slots=True)
class _Loss:
    evaluate: Callable[[nn.Module, Any], tuple[torch.Tensor, torch.Tensor]]

    def __call__(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return self.evaluate(model, batch)[0]


def _judge(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cross entropy and the share of right answers; logits (n, classes), labels (n,)."""
    return F.cross_entropy(logits, labels), (logits.argmax(1) == labels).float().mean()


def _judge_language(model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    inputs, targets = batch
    return _judge(model(inputs).flatten(0, 1), targets.flatten())


def _judge_topics(model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return _judge(model(batch["tokens"], mask=batch["mask"]), batch["labels"])


def _judge_speech(model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    frames, lengths, speakers = batch
    return _judge(model(frames, lengths), speakers)


def _judge_table(model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    columns, labels = batch
    return _judge(model(columns), labels)


def _language(data: str, batch_size: int, seed: int) -> Splits:
    return language_batches(data, length=LENGTH, batch_size=batch_size)


def _topics(data: str, batch_size: int, seed: int) -> Splits:
    return topic_batches(data, num_topics=NUM_TOPICS, max_length=LENGTH, batch_size=batch_size)


def _speech(data: str, batch_size: int, seed: int) -> Splits:
    return speech_batches(data, batch_size=batch_size)


def _table(data: str, batch_size: int, seed: int) -> Splits:
    return tabular_batches(data, batch_size=batch_size, seed=seed)


_GPT = partial(ByteTransformer, num_tokens=NUM_BYTES, num_outputs=NUM_BYTES, max_length=LENGTH, causal=True)
_BERT = partial(ByteTransformer, num_tokens=NUM_BYTES + 1, num_outputs=NUM_TOPICS, max_length=LENGTH, causal=False)
_SPEECH = {"num_features": NUM_FEATURES, "num_classes": NUM_SPEAKERS}

SMALL_MODELS: dict[str, _Kind] = {
    "gpt-small": _Kind(_GPT, TEXT_NAMES, _language, _judge_language, f"{LENGTH} bytes"),
    "bert-small": _Kind(_BERT, TEXT_NAMES, _topics, _judge_topics, f"{LENGTH} bytes"),
    "lstm": _Kind(partial(RecurrentClassifier, "lstm", **_SPEECH), SPEECH_NAMES, _speech, _judge_speech, "utterances"),
    "gru": _Kind(partial(RecurrentClassifier, "gru", **_SPEECH), SPEECH_NAMES, _speech, _judge_speech, "utterances"),
    "conv1d": _Kind(partial(ConvolutionalClassifier, **_SPEECH), SPEECH_NAMES, _speech, _judge_speech, "utterances"),
    "mlp": _Kind(
        partial(build_mlp, num_features=NUM_COLUMNS, num_classes=2), TABULAR_NAMES, _table, _judge_table, "columns"
    ),
}
"""The models that come along beside torchvision's, in the order of the help text."""
