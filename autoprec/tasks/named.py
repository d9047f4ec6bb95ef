"""A task by the names of its model and data: what `autoprec search --model NAME --data NAME` trains."""

from __future__ import annotations

import dataclasses
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
from autoprec.tasks.settings import NamedSettings, check_data, optimizer_of
from autoprec.tasks.small_networks import ByteTransformer, ConvolutionalClassifier, RecurrentClassifier, build_mlp
from autoprec.tasks.source import with_source
from autoprec.tasks.speech import NUM_FEATURES, NUM_SPEAKERS, SPEECH_NAMES, speech_batches
from autoprec.tasks.tabular import NUM_COLUMNS, TABULAR_NAMES, tabular_batches
from autoprec.tasks.text import NUM_BYTES, TEXT_NAMES, language_batches, load_text, topic_batches

__all__ = ["FAMILIES", "SMALL_MODELS", "named_task"]

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
    batch_size: int | None = None,
    optimizer: str = "adamw",
    lr: float = 1e-3,
    seed: int = 0,
    target_image_size: int | None = None,
    target_batch_size: int = 128,
) -> Task:
    """Describe the training of a model by name; it picks what it is trained for, with data that comes along.

    Args:
        model: `resnet50` or `torchvision:NAME` (classifiers and segmentation models), `timm:NAME`, `hf:ARCHITECTURE` or
            `hf:FOLDER` (transformers); or `gpt-small` and `bert-small` on text, `lstm`, `gru` and `conv1d` on speech,
            `mlp` on a table.
        data: None takes the first that goes with the model (`digits`, `topics`, `japanese_vowels`, `breast_cancer`).
        image_size, target_image_size: for images alone; None takes 32 (64 for segmentation) and 224.
        batch_size: of the trials; None takes 32, for segmentation 8.
        weights, optimizer, lr, seed, target_batch_size: as `vision_task`.

    Raises:
        UsageError: an unknown name, with the nearest; data or a setting that does not go with the model.
        TaskError: the data or weights are missing or do not fit; a package that is not installed.
    """
    settings = NamedSettings(**locals()).filled()
    family, colon, name = model.partition(":")
    if colon and family not in FAMILIES:
        allowed = ", ".join(f"{known}:" for known in FAMILIES)
        raise UsageError(f"model {model!r}: {family!r} is none of {allowed}{did_you_mean(family, FAMILIES)}")
    if colon:
        return FAMILIES[family](name, settings)
    return _small_task(settings) if model in SMALL_MODELS else _torchvision(model, settings)


def _torchvision(model: str, settings: NamedSettings) -> Task:
    from autoprec.tasks.networks import MODEL_NAMES, SEGMENTATION_NAMES

    settings = dataclasses.replace(settings, model=model)  # with and without the prefix it is one study
    if model in SEGMENTATION_NAMES:
        from autoprec.tasks.segmentation import segmentation_task

        return segmentation_task(model, settings, settings.source())
    if model in MODEL_NAMES:
        from autoprec.tasks.vision import torchvision_task

        return torchvision_task(model, settings, settings.source())
    raise UsageError(
        f"model {model!r}: not one of torchvision's {len(MODEL_NAMES)} classification and"
        f" {len(SEGMENTATION_NAMES)} segmentation models and not {', '.join(SMALL_MODELS)}"
        f"{did_you_mean(model, [*MODEL_NAMES, *SEGMENTATION_NAMES, *SMALL_MODELS])}; others: timm:NAME,"
        " hf:ARCHITECTURE, hf:FOLDER"
    )


def _timm(model: str, settings: NamedSettings) -> Task:
    from autoprec.tasks.timm_models import timm_task

    return timm_task(model, settings, settings.source())


def _transformers(model: str, settings: NamedSettings) -> Task:
    from autoprec.tasks.transformers_models import transformers_task

    return transformers_task(model, settings, settings.source())


FAMILIES: dict[str, Callable[[str, NamedSettings], Task]] = {
    "torchvision": _torchvision,
    "timm": _timm,
    "hf": _transformers,
}
"""What stands before the colon of a model's name."""


def _small_task(settings: NamedSettings) -> Task:
    settings.refuse("weights", "image_size", "target_image_size", why="takes no images and no start weights")
    kind = SMALL_MODELS[settings.model]
    check_data(settings.model, settings.data, kind.data)
    settings = settings.filled(data=kind.data[0].partition(":")[0], batch_size=32)
    assert settings.data is not None
    assert settings.batch_size is not None
    chosen, chosen_settings = optimizer_of(settings.optimizer, settings.lr)
    train, held_out = kind.batches(settings.data, settings.batch_size, settings.seed)
    name = settings.data.partition(":")[0]
    about = {"data": name} | ({"data_digest": load_text(settings.data).digest} if kind.data == TEXT_NAMES else {})
    task = Task(
        name=settings.model,
        model=kind.build,
        train_batches=train,
        eval_batches=held_out,
        loss=_Loss(kind.evaluate),
        evaluate=kind.evaluate,
        optimizer=chosen,
        optimizer_settings=chosen_settings,
        max_grad_norm=1.0,
        target=TargetShape(
            make_batch=partial(train.first, settings.target_batch_size),
            batch_size=settings.target_batch_size,
            description=f"{settings.target_batch_size} x {kind.shape}",
        ),
        settings=settings.identity() | about,
    )
    return with_source(task, settings.source())


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
