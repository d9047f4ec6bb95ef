"""Image classification: torchvision's models by name, and the task that every family of image models shares."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from autoprec.tasks.epochs import EpochBatches
from autoprec.tasks.images import DATA_NAMES, batches_of, load_images
from autoprec.tasks.networks import (
    auxiliary_weight,
    build_network,
    check_image_size,
    check_network_name,
    load_start_weights,
    weights_digest,
)
from autoprec.tasks.protocol import TargetShape, Task
from autoprec.tasks.settings import NamedSettings, check_data, optimizer_of
from autoprec.tasks.source import TaskSource, with_source

__all__ = ["BuildNetwork", "classification_task", "image_task", "vision_task"]

ImageBatch = tuple[torch.Tensor, torch.Tensor]

BuildNetwork = Callable[..., nn.Module]
"""`build(num_classes=..., image_size=..., weights=...)` -> a fresh model; weights None is the model's own start."""


def vision_task(
    model: str = "resnet50",
    *,
    weights: str | None = None,
    data: str = "digits",
    image_size: int = 32,
    batch_size: int = 32,
    optimizer: str = "adamw",
    lr: float = 1e-3,
    seed: int = 0,
    target_image_size: int = 224,
    target_batch_size: int = 128,
) -> Task:
    """Describe the training of one of torchvision's classification models.

    Args:
        model: a name such as "resnet50"; it gets as many outputs as the data has classes.
        weights: None (torchvision's own initialisation), "DEFAULT" (its pretrained weights, downloaded where they
            are not cached) or a file that holds a state dict.
        data: `digits`, `mnist`, `cifar10:PATH`, `cifar100:PATH` or `imagefolder:PATH`.
        image_size: in pixels, for the trials; images are resized to it.
        batch_size: of the trials.
        optimizer: adamw, adam or sgd (with momentum 0.9).
        seed: decides the held-out split of data that has none of its own.
        target_image_size, target_batch_size: the shape of the real run.

    Raises:
        UsageError: an unknown model, data set or optimizer, with the nearest names; a setting out of range.
        TaskError: the data or weights are missing or do not fit, or an image size that the model cannot take.
    """
    arguments = dict(locals())
    check_network_name(model)
    return torchvision_task(model, NamedSettings(**arguments), TaskSource("vision", arguments))


def torchvision_task(model: str, settings: NamedSettings, source: TaskSource) -> Task:
    """Describe the training of a classifier of torchvision's, as `vision_task` does."""
    settings = settings.filled(image_size=32, target_image_size=224)
    for setting in ("image_size", "target_image_size"):
        check_image_size(model, getattr(settings, setting), setting=setting)
    return classification_task(
        settings, model=model, build=partial(_build, model), source=source, auxiliary_weight=auxiliary_weight(model)
    )


def _build(model: str, *, num_classes: int, image_size: int, weights: str | None) -> nn.Module:
    network = build_network(model, num_classes=num_classes, image_size=image_size)
    if weights is not None:
        load_start_weights(network, weights, name=model)
    return network


def classification_task(
    settings: NamedSettings,
    *,
    model: str,
    build: BuildNetwork,
    source: TaskSource,
    auxiliary_weight: float = 0.0,
    about: Mapping[str, Any] | None = None,
) -> Task:
    """Describe the training of a classifier of images; arguments as `image_task`.

    Raises:
        UsageError: data that is no images, an unknown optimizer. TaskError: the data or weights are missing.
    """
    check_data(settings.model, settings.data, DATA_NAMES)
    settings = settings.filled(data="digits", batch_size=32, image_size=32, target_image_size=224)
    assert settings.data is not None
    images = load_images(settings.data, seed=settings.seed)
    loss = _Loss(auxiliary_weight)
    return image_task(
        settings,
        model=model,
        build=partial(build, num_classes=images.num_classes),
        batches=partial(batches_of, images),
        judge=loss,
        metric=_accuracy,
        metric_name="accuracy",
        source=source,
        about={"data": images.name, "data_digest": images.digest, **(about or {})},
    )


def image_task(
    settings: NamedSettings,
    *,
    model: str,
    build: BuildNetwork,
    batches: Callable[..., tuple[EpochBatches, EpochBatches]],
    judge: Any,
    metric: Callable[[nn.Module, Any], torch.Tensor],
    metric_name: str,
    source: TaskSource,
    about: Mapping[str, Any],
) -> Task:
    """Describe a training on images.

    Args:
        settings: with every size filled in.
        model: the task's name.
        build: called with `image_size` and `weights`.
        batches: called with `image_size` and `batch_size`; gives the training and held-out batches.
        judge: the loss; its `evaluate` gives loss and metric from one forward.
        about: what else decides the numbers, as JSON values.

    Raises:
        UsageError, TaskError: an unknown optimizer, or weights that are missing.
    """
    chosen, chosen_settings = optimizer_of(settings.optimizer, settings.lr)
    train, held_out = batches(image_size=settings.image_size, batch_size=settings.batch_size)
    target, _ = batches(image_size=settings.target_image_size, batch_size=settings.batch_size)
    identity = settings.identity() | dict(about)
    if settings.weights is not None:
        identity["weights"] = weights_digest(settings.weights)
    size = settings.target_image_size
    task = Task(
        name=model,
        model=partial(build, image_size=settings.image_size, weights=settings.weights),
        train_batches=train,
        eval_batches=held_out,
        loss=judge,
        metric=metric,
        evaluate=judge.evaluate,
        metric_name=metric_name,
        optimizer=chosen,
        optimizer_settings=chosen_settings,
        target=TargetShape(
            make_batch=partial(target.first, settings.target_batch_size),
            batch_size=settings.target_batch_size,
            description=f"{settings.target_batch_size} x 3 x {size} x {size}",
            model=partial(build, image_size=size, weights=None),
        ),
        settings=identity,
    )
    return with_source(task, source)


@dataclass(frozen=True, slots=True)
class _Loss:
    """Cross entropy, with the auxiliary heads that some models have in training."""

    auxiliary_weight: float

    def __call__(self, model: nn.Module, batch: ImageBatch) -> torch.Tensor:
        pixels, labels = batch
        return self._of_outputs(model(pixels), labels)

    def evaluate(self, model: nn.Module, batch: ImageBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the loss and the accuracy from one forward."""
        pixels, labels = batch
        outputs = model(pixels)
        return self._of_outputs(outputs, labels), _share_correct(outputs, labels)

    def _of_outputs(self, outputs: Any, labels: torch.Tensor) -> torch.Tensor:
        if not isinstance(outputs, tuple):
            return F.cross_entropy(_logits(outputs), labels)
        losses = [F.cross_entropy(head, labels) for head in outputs if head is not None]
        total: torch.Tensor = losses[0] + self.auxiliary_weight * sum(losses[1:])
        return total


def _accuracy(model: nn.Module, batch: ImageBatch) -> torch.Tensor:
    pixels, labels = batch
    return _share_correct(model(pixels), labels)


def _share_correct(outputs: Any, labels: torch.Tensor) -> torch.Tensor:
    return (_logits(outputs).argmax(1) == labels).float().mean()


def _logits(outputs: Any) -> torch.Tensor:
    """Return the logits of the main head: a tensor, the first of a tuple, or `logits` of transformers."""
    if isinstance(outputs, tuple):
        outputs = outputs[0]
    return outputs if isinstance(outputs, torch.Tensor) else outputs.logits
