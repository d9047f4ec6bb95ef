"""The norm of the gradients that optimizers are given, read as each takes its step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

__all__ = ["StepNorms"]


class StepNorms:
    """Hooks on optimizers; `enabled` switches the reading, which waits for the device."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], *, enabled: bool) -> None:
        self.enabled = enabled
        self._norms: list[torch.Tensor] = []
        self._handles = [optimizer.register_step_pre_hook(self._before_step) for optimizer in optimizers]

    def take(self) -> float | None:
        """Return the norm over all optimizers since the last call; None where none took a step."""
        norms, self._norms = [float(norm) for norm in self._norms], []
        return math.hypot(*norms) if norms else None

    def close(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        found_inf = getattr(optimizer, "found_inf", None)
        if not self.enabled or (found_inf is not None and float(found_inf) > 0.0):  # a fused kernel skips by itself
            return
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if not gradients:
            return
        norm = nn.utils.get_total_norm(gradients)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        scale = getattr(optimizer, "grad_scale", None)  # a fused kernel unscales by itself
        self._norms.append(norm if scale is None else norm / scale.to(norm.device))
