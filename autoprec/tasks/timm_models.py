"""Image classifiers of timm by name; timm is imported here alone, when such a model is asked for."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

from torch import nn

from autoprec.errors import UsageError, did_you_mean
from autoprec.tasks.networks import load_start_weights
from autoprec.tasks.protocol import Task
from autoprec.tasks.settings import NamedSettings, missing_extra
from autoprec.tasks.source import TaskSource
from autoprec.tasks.vision import classification_task

__all__ = ["timm_task"]


def timm_task(model: str, settings: NamedSettings, source: TaskSource) -> Task:
    """Describe the training of one of timm's classifiers, `timm:NAME`.

    Weights as for torchvision's: None is timm's own initialisation, "DEFAULT" downloads.

    Raises:
        UsageError: a name that timm does not have, with the nearest; data that is no images.
        TaskError: timm is not installed; the data or weights are missing or do not fit.
    """
    timm = _import(settings.model)
    if not timm.is_model(model):
        names = timm.list_models()
        raise UsageError(f"model {settings.model!r}: not one of timm's {len(names)} models{did_you_mean(model, names)}")
    return classification_task(
        settings,
        model=settings.model,
        build=partial(_build, model),
        source=source,
        about={"timm": timm.__version__},
    )


def _build(model: str, *, num_classes: int, image_size: int, weights: str | None) -> nn.Module:
    timm = _import(f"timm:{model}")
    about = timm.get_pretrained_cfg(model)
    sized = {"img_size": image_size} if about is not None and about.fixed_input_size else {}
    network: nn.Module = timm.create_model(model, pretrained=weights == "DEFAULT", num_classes=num_classes, **sized)
    if weights not in (None, "DEFAULT"):
        assert weights is not None
        load_start_weights(network, weights, name=model)
    return network


def _import(model: str) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # its own, about what it will import from elsewhere
            import timm
    except ImportError:
        raise missing_extra(model, "timm", "timm") from None
    return timm
