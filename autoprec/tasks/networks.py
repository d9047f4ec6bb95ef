"""torchvision's classification models by name: built for the data's classes and image size, weights where asked."""

from __future__ import annotations

import hashlib
import pickle
import re
import warnings
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torchvision import models

from autoprec.errors import PrecisionWarning, TaskError, UsageError, did_you_mean

__all__ = [
    "MODEL_NAMES",
    "SEGMENTATION_NAMES",
    "auxiliary_weight",
    "build_network",
    "build_segmentation_network",
    "check_image_size",
    "check_network_name",
    "load_start_weights",
    "weights_digest",
]

MODEL_NAMES = tuple(models.list_models(module=models))
SEGMENTATION_NAMES = tuple(models.list_models(module=models.segmentation))

SMALLEST_IMAGE = {"inception_v3": 299, "maxvit": 224, "alexnet": 63, "densenet": 29, "vgg": 32, "convnext": 32}
"""The smallest image, in pixels, that a training forward takes: found by trying each model. Others take 32 and less."""
IMAGE_STEP = {"maxvit": 224, "vit_h_14": 14, "vit_b_16": 16, "vit_l_16": 16, "vit_b_32": 32, "vit_l_32": 32}
"""Image sizes must be multiples of this: the patch, or the patch and window of every stage of a MaxViT."""
AUXILIARY_WEIGHTS = {"googlenet": 0.3, "inception_v3": 0.4}
"""Weight of an auxiliary head's loss. GoogLeNet: Szegedy et al., "Going deeper with convolutions", section 5.
Inception v3: TensorFlow-Slim's inception_v3 training, which PyTorch's fine-tuning tutorial follows."""


def check_network_name(name: str) -> None:
    """Refuse a model that torchvision does not have.

    Raises:
        UsageError: with the nearest names.
    """
    if name not in MODEL_NAMES:
        raise UsageError(
            f"model {name!r}: not one of torchvision's {len(MODEL_NAMES)} classification models"
            f"{did_you_mean(name, MODEL_NAMES)}"
        )


def check_image_size(name: str, size: int, *, setting: str) -> None:
    """Refuse an image size that the model cannot take; `setting` is what the person gave it by.

    Raises:
        TaskError: with the sizes that the model takes.
    """
    smallest = _by_prefix(SMALLEST_IMAGE, name, default=8)
    step = _by_prefix(IMAGE_STEP, name, default=1)
    if size < smallest:
        raise TaskError(f"{setting} is {size}: {name} needs at least {smallest} px")
    if size % step:
        nearest = max(step, round(size / step) * step)
        raise TaskError(f"{setting} is {size}: {name} needs a multiple of {step} px, such as {nearest}")


def auxiliary_weight(name: str) -> float:
    return AUXILIARY_WEIGHTS.get(name, 0.0)


def build_network(name: str, *, num_classes: int, image_size: int) -> nn.Module:
    """Build the model with torchvision's own initialisation, drawn from the global random state."""
    settings: dict[str, Any] = {}
    if name in AUXILIARY_WEIGHTS:
        settings["init_weights"] = True
    if name.startswith("vit_"):
        settings["image_size"] = image_size
    if name.startswith("maxvit"):
        settings["input_size"] = (image_size, image_size)
    network: nn.Module = models.get_model(name, weights=None, num_classes=num_classes, **settings)
    return network


def build_segmentation_network(name: str, *, num_classes: int) -> nn.Module:
    """Build one of torchvision's segmentation models with its own initialisation, no weights downloaded.

    It has the auxiliary head of its pretrained weights, where it can have one.
    """
    auxiliary = {} if name.startswith("lraspp") else {"aux_loss": True}
    network: nn.Module = models.get_model(
        name, weights=None, weights_backbone=None, num_classes=num_classes, **auxiliary
    )
    return network


def load_start_weights(network: nn.Module, weights: str, *, name: str) -> None:
    """Load weights into `network`, in place: "DEFAULT" (torchvision's, downloaded where not cached) or a file.

    What has another shape (a head for other classes, the positions of another image size) is left as it was
    initialised, with one PrecisionWarning that lists it.

    Raises:
        TaskError: the file is missing, is no state dict, or is one of another model.
    """
    state = _read_weights(weights, name)
    own = network.state_dict()
    missing = [key for key in own if key not in state and not key.endswith("num_batches_tracked")]
    unknown = [key for key in state if key not in own]
    if missing or unknown:
        raise TaskError(
            f"weights {_shown(weights)} do not fit {name}:"
            f" {len(missing)} names missing {missing[:3]}, {len(unknown)} unknown {unknown[:3]}"
        )
    other = [key for key, value in state.items() if value.shape != own[key].shape]
    if other:
        warnings.warn(
            f"weights {_shown(weights)}: {len(other)} tensors have another shape and start anew:"
            f" {', '.join(other[:6])}",
            PrecisionWarning,
            stacklevel=2,
        )
    network.load_state_dict({key: value for key, value in state.items() if key not in other}, strict=False)


def weights_digest(weights: str) -> str:
    """Return what stands for the weights in a study: DEFAULT, or a hash of the file's bytes. Never a path."""
    if weights == "DEFAULT":
        return weights
    try:
        with open(weights, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()[:16]
    except OSError as error:
        raise TaskError(f"weights {_shown(weights)}: cannot be read ({error.strerror})") from None


@lru_cache(maxsize=1)
def _read_weights(weights: str, name: str) -> Mapping[str, torch.Tensor]:
    if weights == "DEFAULT":
        enumeration = models.get_model_weights(name)
        return enumeration["DEFAULT"].get_state_dict(progress=False, weights_only=True)  # type: ignore[no-any-return]
    try:
        found = torch.load(weights, map_location="cpu", weights_only=True)
    except OSError as error:
        raise TaskError(f"weights {_shown(weights)}: cannot be read ({error.strerror})") from None
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        raise TaskError(f"weights {_shown(weights)}: not a file of plain weights ({type(error).__name__})") from None
    for key in ("state_dict", "model", "model_state_dict"):
        if isinstance(found, Mapping) and isinstance(found.get(key), Mapping):
            found = found[key]
    if not isinstance(found, Mapping) or not all(isinstance(value, torch.Tensor) for value in found.values()):
        raise TaskError(f"weights {_shown(weights)}: found {type(found).__name__}; a state dict of tensors is needed")
    return {re.sub(r"^(module\.|_orig_mod\.)+", "", key): value for key, value in found.items()}


def _shown(weights: str) -> str:
    return weights if weights == "DEFAULT" else repr(Path(weights).name)


def _by_prefix(table: Mapping[str, int], name: str, *, default: int) -> int:
    return next((value for prefix, value in table.items() if name.startswith(prefix)), default)
