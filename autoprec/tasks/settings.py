"""What a person says of a task by name, as one value that every family of models takes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autoprec.errors import TaskError, UsageError, did_you_mean
from autoprec.tasks.source import TaskSource

__all__ = ["OPTIMIZERS", "NamedSettings", "check_data", "missing_extra", "optimizer_of"]

OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": torch.optim.SGD,
}
OPTIMIZER_SETTINGS: dict[str, dict[str, Any]] = {"sgd": {"momentum": 0.9}}


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedSettings:
    """The arguments of `named_task`; None takes what goes with the model."""

    model: str
    data: str | None = None
    weights: str | None = None
    image_size: int | None = None
    batch_size: int | None = None
    optimizer: str = "adamw"
    lr: float = 1e-3
    seed: int = 0
    target_image_size: int | None = None
    target_batch_size: int = 128

    def filled(self, **defaults: Any) -> NamedSettings:
        """Return the settings with defaults where nothing was said.

        Raises:
            UsageError: a size below 1.
        """
        given = {name: value for name, value in defaults.items() if getattr(self, name) is None}
        filled = dataclasses.replace(self, **given)
        for name in ("image_size", "batch_size", "target_image_size", "target_batch_size"):
            value = getattr(filled, name)
            if value is not None and value < 1:
                raise UsageError(f"{name} is {value}; image and batch sizes are each at least 1")
        return filled

    def refuse(self, *names: str, why: str) -> None:
        """Refuse settings that do not go with the model.

        Raises:
            UsageError: one of them was given.
        """
        for name in names:
            if getattr(self, name) is not None:
                raise UsageError(f"{name} is {getattr(self, name)!r}: {self.model} {why}; leave it out")

    def source(self) -> TaskSource:
        """Return how another process builds the task."""
        return TaskSource("named", dataclasses.asdict(self))

    def identity(self) -> dict[str, Any]:
        """Return what decides the numbers, as JSON values: paths and what does not go with the model left out."""
        values = dataclasses.asdict(self)
        return {name: value for name, value in values.items() if name not in ("data", "weights") and value is not None}


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


def check_data(model: str, data: str | None, own: Sequence[str]) -> None:
    """Refuse data of another kind than the model's `own`; names that are of no kind are left to the loaders.

    Raises:
        UsageError: with the data that goes with the model, and the models that the data goes with.
    """
    if data is None:
        return
    name = data.partition(":")[0]
    takers = [models for models, names in _takers().items() if name in _plain(names)]
    if name in _plain(own) or not takers:
        return
    raise UsageError(
        f"data {name!r} does not go with {model} (allowed: {', '.join(own)}); it goes with {' and '.join(takers)}"
    )


def _takers() -> dict[str, Sequence[str]]:
    from autoprec.tasks.images import DATA_NAMES
    from autoprec.tasks.masks import MASK_NAMES
    from autoprec.tasks.speech import SPEECH_NAMES
    from autoprec.tasks.tabular import TABULAR_NAMES
    from autoprec.tasks.text import TEXT_NAMES

    return {
        "torchvision's models, timm's and hf's of images": DATA_NAMES,
        "torchvision's segmentation models": MASK_NAMES,
        "gpt-small, bert-small and hf's language models": TEXT_NAMES,
        "lstm, gru, conv1d": SPEECH_NAMES,
        "mlp": TABULAR_NAMES,
    }


def _plain(names: Sequence[str]) -> list[str]:
    return [name.partition(":")[0] for name in names]


def missing_extra(model: str, package: str, extra: str) -> TaskError:
    """Return the error for a package that is not installed."""
    return TaskError(f"model {model!r} needs {package}, which is not installed: pip install 'autoprec[{extra}]'")
