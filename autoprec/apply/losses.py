"""Loss functions inside a model's forward stay FP32 in half regions."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from autoprec.apply.trees import cast_tree

__all__ = ["FP32Losses", "calls_a_loss", "is_loss_module"]

LOSS_NAMES = (
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
    "cosine_embedding_loss",
    "cross_entropy",
    "ctc_loss",
    "gaussian_nll_loss",
    "hinge_embedding_loss",
    "huber_loss",
    "kl_div",
    "l1_loss",
    "margin_ranking_loss",
    "mse_loss",
    "multi_margin_loss",
    "multilabel_margin_loss",
    "multilabel_soft_margin_loss",
    "nll_loss",
    "poisson_nll_loss",
    "smooth_l1_loss",
    "soft_margin_loss",
    "triplet_margin_loss",
    "triplet_margin_with_distance_loss",
)
"""The loss functions of torch.nn.functional (torch 2.14)."""

_LOSSES = frozenset(getattr(F, name) for name in LOSS_NAMES if hasattr(F, name))


class FP32Losses(TorchFunctionMode):
    """Compute loss functions on FP32 copies of their arguments."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _LOSSES:
            args, kwargs = cast_tree(args, torch.float32), cast_tree(kwargs, torch.float32)
        return func(*args, **kwargs)


def is_loss_module(module: nn.Module) -> bool:
    """Whether the module is one of torch's loss modules (or made from one)."""
    return isinstance(module, (nn.modules.loss._Loss, nn.AdaptiveLogSoftmaxWithLoss))


@cache
def calls_a_loss(cls: Any) -> bool:
    """Whether the code of a module class (torch's own classes aside) names a loss function."""
    if cls.__module__.startswith("torch.nn.") or cls is nn.Module:
        return False
    return any(
        name in LOSS_NAMES
        for base in cls.__mro__
        if not base.__module__.startswith("torch.") and base is not object
        for member in vars(base).values()
        if isinstance(function := getattr(member, "__func__", member), types.FunctionType)
        for name in _names(function.__code__)
    )


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)
