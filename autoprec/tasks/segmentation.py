"""Semantic segmentation with torchvision's models by name."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from autoprec.tasks.masks import IGNORED, MASK_NAMES, load_masks, mask_batches
from autoprec.tasks.networks import build_segmentation_network, load_start_weights
from autoprec.tasks.protocol import Task
from autoprec.tasks.settings import NamedSettings, check_data
from autoprec.tasks.source import TaskSource
from autoprec.tasks.vision import image_task

__all__ = ["segmentation_task"]

AUXILIARY_WEIGHT = 0.5
"""Weight of the auxiliary head's loss (torchvision's references/segmentation/train.py)."""
BATCH_SIZE = 8
"""Dilated convolutions at an eighth of the image's size: a batch takes several times what it does in a classifier."""

MaskBatch = tuple[torch.Tensor, torch.Tensor]


def segmentation_task(model: str, settings: NamedSettings, source: TaskSource) -> Task:
    """Describe the training of one of torchvision's segmentation models; `accuracy` is the intersection over union.

    Data: `digits` or `mnist`, whose ink is labelled with the digit, or `masks:PATH`.

    Raises:
        UsageError: other data, an unknown optimizer. TaskError: the data or weights are missing or do not fit.
    """
    check_data(settings.model, settings.data, MASK_NAMES)
    settings = settings.filled(data="digits", batch_size=BATCH_SIZE, image_size=64, target_image_size=224)
    assert settings.data is not None
    data = load_masks(settings.data, seed=settings.seed)
    return image_task(
        settings,
        model=model,
        build=partial(_build, model, num_classes=data.num_classes),
        batches=partial(mask_batches, data),
        judge=_Judge(),
        metric=_overlap,
        metric_name="intersection over union",
        source=source,
        about={"data": data.name, "data_digest": data.digest, "labels": "masks"},
    )


def _build(model: str, *, num_classes: int, image_size: int, weights: str | None) -> nn.Module:
    network = build_segmentation_network(model, num_classes=num_classes)
    if weights is not None:
        load_start_weights(network, weights, name=model)
    return network


class _Judge:
    """Cross entropy of every pixel, with that of the auxiliary head where there is one."""

    def __call__(self, model: nn.Module, batch: MaskBatch) -> torch.Tensor:
        images, masks = batch
        return _loss(model(images), masks)

    def evaluate(self, model: nn.Module, batch: MaskBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the loss and the overlap from one forward."""
        images, masks = batch
        outputs = model(images)
        return _loss(outputs, masks), _overlap_of(outputs, masks)


def _loss(outputs: Any, masks: torch.Tensor) -> torch.Tensor:
    loss = F.cross_entropy(outputs["out"], masks, ignore_index=IGNORED)
    if "aux" in outputs:
        loss = loss + AUXILIARY_WEIGHT * F.cross_entropy(outputs["aux"], masks, ignore_index=IGNORED)
    return loss


def _overlap(model: nn.Module, batch: MaskBatch) -> torch.Tensor:
    images, masks = batch
    return _overlap_of(model(images), masks)


def _overlap_of(outputs: Any, masks: torch.Tensor) -> torch.Tensor:
    """Return the share of right pixels among those that are, or are taken for, another class than the background."""
    found = outputs["out"].argmax(1)
    union = ((found > 0) | (masks > 0)) & (masks != IGNORED)
    right = (found == masks) & union
    return right.sum() / union.sum() if union.any() else torch.ones(())
