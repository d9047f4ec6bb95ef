"""Loss functions inside a model's forward stay FP32."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from autoprec.apply.trees import cast_tree, first_tensor

__all__ = ["FP32Losses", "is_loss_module", "losses_called"]

MAX_DEPTH = 3
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

_KNOWN: WeakKeyDictionary[type, frozenset[str]] = WeakKeyDictionary()


class FP32Losses(TorchFunctionMode):
    """Compute loss functions on FP32 copies of their arguments, outside autocast."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in _LOSSES:
            return func(*args, **kwargs)
        tensor = first_tensor(args, kwargs)
        device_type = "cpu" if tensor is None else tensor.device.type
        args, kwargs = cast_tree(args, torch.float32), cast_tree(kwargs, torch.float32)
        if not torch.is_autocast_enabled(device_type):
            return func(*args, **kwargs)
        with torch.autocast(device_type, enabled=False):
            return func(*args, **kwargs)


def is_loss_module(module: nn.Module) -> bool:
    """Whether the module is a loss: torch's own, made from one, or called one and without a network inside."""
    if isinstance(module, (nn.modules.loss._Loss, nn.AdaptiveLogSoftmaxWithLoss)):
        return True
    named = type(module).__name__.endswith(("Loss", "Criterion"))
    return named and not any(True for child in module.children() for _ in child.parameters())


def losses_called(cls: type[nn.Module]) -> frozenset[str]:
    """Return the loss functions that the code of a module class names, itself or through functions it calls.

    torch's own classes are left out. The code is read, not run.
    """
    if cls not in _KNOWN:
        _KNOWN[cls] = frozenset(_losses_of(cls))
    return _KNOWN[cls]


def _losses_of(cls: type[nn.Module]) -> Iterator[str]:
    functions = [
        function
        for base in cls.__mro__
        if not base.__module__.startswith("torch.") and base is not object
        for member in list(vars(base).values())
        if isinstance(function := getattr(member, "__func__", member), types.FunctionType)
    ]
    seen: set[types.CodeType] = set()
    for function in functions:
        yield from _losses_named(function, seen, 0)


def _losses_named(function: types.FunctionType, seen: set[types.CodeType], depth: int) -> Iterator[str]:
    if function.__code__ in seen or depth > MAX_DEPTH:
        return
    seen.add(function.__code__)
    for name in _names(function.__code__):
        if name in LOSS_NAMES:
            yield name
        called = function.__globals__.get(name)
        if isinstance(called, types.FunctionType) and not called.__module__.startswith("torch."):
            yield from _losses_named(called, seen, depth + 1)


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)
