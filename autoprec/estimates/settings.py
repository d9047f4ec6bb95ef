"""What one estimated training step does, apart from its model and batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autoprec.errors import UsageError
from autoprec.policy import Policy

__all__ = ["Loss", "StepSettings"]

Loss = Callable[[nn.Module, Any], torch.Tensor]
"""`loss(model, batch)` -> scalar tensor; calls the model that it is given."""


@dataclass(frozen=True, kw_only=True)
class StepSettings:
    """One training step: its policy, optimizer, accumulation and shape.

    Attributes:
        policy: installed on the copy; None leaves the model as it is, its own policy included.
        optimizer: a class, or a function from parameters to an optimizer.
        optimizer_settings: keyword arguments of a class.
        optimizers: a function from the copied model to its optimizers; wins over `optimizer`. None takes that.
        losses: a loss for each of the optimizers, each with a forward, backward and step of its own, in this order;
            empty where the one loss trains all.
        accumulation_steps: micro-batches to one optimizer step; the batch is one micro-batch.
        set_to_none: as in `optimizer.zero_grad`.
        foreach: run the optimizer as CUDA does by default, on lists of tensors; False leaves the optimizer's own way.
        as_on_cuda: charge dropout as CUDA's fused kernels do, not as the CPU's.
        batch_size: rescale the batch; None keeps its size.
        image_size: rescale images (floating, four dimensions) to this height and width; None keeps them.
        num_samples: samples in a batch; None takes the first dimension of its first tensor.
    """

    policy: Policy | None = None
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW
    optimizer_settings: Mapping[str, Any] | None = None
    optimizers: Callable[[nn.Module], Sequence[torch.optim.Optimizer]] | None = None
    losses: Sequence[Loss] = ()
    accumulation_steps: int = 1
    set_to_none: bool = True
    foreach: bool = True
    as_on_cuda: bool = True
    batch_size: int | None = None
    image_size: int | None = None
    num_samples: Callable[[Any], int] | None = None

    def __post_init__(self) -> None:
        for name in ("accumulation_steps", "batch_size", "image_size"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise UsageError(f"{name}: found {value!r}; allowed: whole numbers from 1")
