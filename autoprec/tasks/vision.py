"""Image classification with torchvision's models by name: the task behind `autoprec search --model resnet50`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from autoprec.errors import UsageError, did_you_mean
from autoprec.tasks.images import batches_of, load_images
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

__all__ = ["vision_task", "optimizer_of", "OPTIMIZERS"]

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
    chosen, chosen_settings = optimizer_of(optimizer, lr)
    sizes = [image_size, batch_size, target_image_size, target_batch_size]
    if min(sizes) < 1:
        raise UsageError(f"image and batch sizes are {sizes}; each at least 1")
    check_image_size(model, image_size, setting="image_size")
    check_image_size(model, target_image_size, setting="target_image_size")
    images = load_images(data, seed=seed)
    train, held_out = batches_of(images, image_size=image_size, batch_size=batch_size)
    settings = {key: value for key, value in arguments.items() if key not in ("data", "weights")}
    if weights is not None:
        settings["weights"] = weights_digest(weights)
    network = _Network(model, weights, images.num_classes, image_size)
    target, _ = batches_of(images, image_size=target_image_size, batch_size=batch_size)
    loss = _Loss(auxiliary_weight(model))
    return Task(
        name=model,
        model=network,
        train_batches=train,
        eval_batches=held_out,
        loss=loss,
        metric=_accuracy,
        evaluate=loss.evaluate,
        optimizer=chosen,
        optimizer_settings=chosen_settings,
        target=TargetShape(
            make_batch=partial(target.first, target_batch_size),
            batch_size=target_batch_size,
            description=f"{target_batch_size} x 3 x {target_image_size} x {target_image_size}",
            model=_Network(model, None, images.num_classes, target_image_size),
        ),
        settings=settings | {"data": images.name, "data_digest": images.digest},
        source=TaskSource("vision", arguments),
    )


def optimizer_of(optimizer: str, lr: float) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """Return the class of an optimizer by name, and its settings.

    Raises:
        UsageError: an unknown name, or a learning rate that is not positive.
    """
    if optimizer not in OPTIMIZERS:
        raise UsageError(
            f"optimizer {optimizer!r}; allowed: {', '.join(OPTIMIZERS)}{did_you_mean(optimizer, OPTIMIZERS)}"
        )
    if not 0 < lr < float("inf"):
        raise UsageError(f"lr is {lr}; a positive number is needed")
    return OPTIMIZERS[optimizer], {"lr": lr, **OPTIMIZER_SETTINGS.get(optimizer, {})}


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
