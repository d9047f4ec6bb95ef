"""Image classification with torchvision's models by name: the task behind `autoprec search --model resnet50`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from autoprec.errors import TaskError, UsageError, did_you_mean
from autoprec.tasks.images import ImageData, Images, load_images
from autoprec.tasks.networks import (
    auxiliary_weight,
    build_network,
    check_image_size,
    check_network_name,
    load_start_weights,
    weights_digest,
)
from autoprec.tasks.protocol import TargetShape, Task
from autoprec.tasks.source import TaskSource

__all__ = ["vision_task", "OPTIMIZERS"]

OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": torch.optim.SGD,
}
OPTIMIZER_SETTINGS: dict[str, dict[str, Any]] = {"sgd": {"momentum": 0.9}}

ImageBatch = tuple[torch.Tensor, torch.Tensor]


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
    _check_settings(optimizer, lr, [image_size, batch_size, target_image_size, target_batch_size])
    check_image_size(model, image_size, setting="image_size")
    check_image_size(model, target_image_size, setting="target_image_size")
    images = load_images(data, seed=seed)
    _check_sizes(images, batch_size)
    settings = {key: value for key, value in arguments.items() if key not in ("data", "weights")}
    if weights is not None:
        settings["weights"] = weights_digest(weights)
    network = _Network(model, weights, images.num_classes, image_size)
    target_shape = _TargetBatch(images.train, target_image_size, target_batch_size)
    loss = _Loss(auxiliary_weight(model))
    return Task(
        name=model,
        model=network,
        train_batches=_TrainBatches(images.train, image_size, batch_size),
        eval_batches=_EvalBatches(images.held_out, image_size, batch_size),
        loss=loss,
        metric=_accuracy,
        evaluate=loss.evaluate,
        optimizer=OPTIMIZERS[optimizer],
        optimizer_settings={"lr": lr, **OPTIMIZER_SETTINGS.get(optimizer, {})},
        target=TargetShape(
            make_batch=target_shape,
            batch_size=target_batch_size,
            description=f"{target_batch_size} x 3 x {target_image_size} x {target_image_size}",
            model=_Network(model, None, images.num_classes, target_image_size),
        ),
        settings=settings | {"data": images.name, "data_digest": images.digest},
        source=TaskSource("vision", arguments),
    )


def _check_settings(optimizer: str, lr: float, sizes: list[int]) -> None:
    if optimizer not in OPTIMIZERS:
        raise UsageError(
            f"optimizer {optimizer!r}; allowed: {', '.join(OPTIMIZERS)}{did_you_mean(optimizer, OPTIMIZERS)}"
        )
    if not 0 < lr < float("inf"):
        raise UsageError(f"lr is {lr}; a positive number is needed")
    if min(sizes) < 1:
        raise UsageError(f"image and batch sizes are {sizes}; each at least 1")


def _check_sizes(images: ImageData, batch_size: int) -> None:
    num_train, num_held_out = len(images.train.labels), len(images.held_out.labels)
    if num_train == 0 or num_held_out == 0:
        raise TaskError(
            f"data {images.name!r} has {num_train} training and {num_held_out} held-out images: 0 batches of"
            f" {batch_size}; at least one image of each is needed"
        )
    if batch_size > num_train:
        raise TaskError(f"batch_size is {batch_size}: larger than the {num_train} training images of {images.name!r}")


@dataclass(frozen=True, slots=True)
class _Network:
    """Builds the model of the task, fresh each time."""

    name: str
    weights: str | None
    num_classes: int
    image_size: int

    def __call__(self) -> nn.Module:
        network = build_network(self.name, num_classes=self.num_classes, image_size=self.image_size)
        if self.weights is not None:
            load_start_weights(network, self.weights, name=self.name)
        return network


@dataclass(frozen=True, slots=True)
class _TrainBatches:
    """One epoch in an order drawn from the global random state; the last batch may be smaller."""

    images: Images
    image_size: int
    batch_size: int

    def __call__(self) -> Iterator[ImageBatch]:
        order = torch.randperm(len(self.images.labels))
        yield from _batches(self.images, order, self.image_size, self.batch_size)


@dataclass(frozen=True, slots=True)
class _EvalBatches:
    """Every held-out image once, in order."""

    images: Images
    image_size: int
    batch_size: int

    def __call__(self) -> Iterator[ImageBatch]:
        yield from _batches(self.images, torch.arange(len(self.images.labels)), self.image_size, self.batch_size)


@dataclass(frozen=True, slots=True)
class _TargetBatch:
    """One training batch of the real run's shape; data with fewer images is repeated."""

    images: Images
    image_size: int
    batch_size: int

    def __call__(self) -> ImageBatch:
        order = torch.arange(self.batch_size) % len(self.images.labels)
        return next(_batches(self.images, order, self.image_size, self.batch_size))


def _batches(images: Images, order: torch.Tensor, image_size: int, batch_size: int) -> Iterator[ImageBatch]:
    for start in range(0, len(order), batch_size):
        indices = order[start : start + batch_size]
        yield images.load(indices.tolist(), size=image_size), images.labels[indices]


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
        if isinstance(outputs, torch.Tensor):
            return F.cross_entropy(outputs, labels)
        losses = [F.cross_entropy(head, labels) for head in outputs if head is not None]
        total: torch.Tensor = losses[0] + self.auxiliary_weight * sum(losses[1:])
        return total


def _accuracy(model: nn.Module, batch: ImageBatch) -> torch.Tensor:
    pixels, labels = batch
    return _share_correct(model(pixels), labels)


def _share_correct(outputs: Any, labels: torch.Tensor) -> torch.Tensor:
    logits = outputs if isinstance(outputs, torch.Tensor) else outputs[0]
    return (logits.argmax(1) == labels).float().mean()
