"""The policy's grad scaler where a framework steps the optimizers: scale, unscale once, step, update, guard."""

from __future__ import annotations

from typing import Any

import torch

from autoprec.apply import PolicyGradScaler, grad_scaler_arguments
from autoprec.errors import ApplyError
from autoprec.policy import Policy
from autoprec.training import ScaleGuard, needs_closure

__all__ = ["GuardedGradScaler", "ScaledSteps", "build_guarded_scaler"]


class GuardedGradScaler(PolicyGradScaler):
    """The policy's grad scaler, which ends a training whose scale runs to zero wherever `update` is called from.

    A step counts as skipped where its update lowered the scale: nothing else lowers it.
    """

    def __init__(self, *, guard: ScaleGuard | None = None, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.guard = guard if guard is not None else ScaleGuard()
        self.num_updates = 0
        self._unscaled: set[int] = set()

    def unscale_once(self, optimizer: torch.optim.Optimizer) -> None:
        """Unscale the optimizer's gradients, unless that was done since the last `update`: whoever asks first."""
        if id(optimizer) not in self._unscaled:
            self.unscale_(optimizer)
            self._unscaled.add(id(optimizer))

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Update the scale as torch does.

        Raises:
            ScaleCollapsedError: it fell below the guard's floor, or too many steps in a row were skipped.
        """
        before = self.get_scale()
        super().update(new_scale)
        self._unscaled.clear()
        self.num_updates += 1
        if self.is_enabled():
            self.guard.check(step=self.num_updates, scale=self.get_scale(), skipped=self.get_scale() < before)


def build_guarded_scaler(policy: Policy, *, device: torch.device) -> GuardedGradScaler | None:
    """Build the grad scaler of a policy for a framework; None where the policy has no FP16.

    Raises:
        ApplyError: the device is not there.
    """
    scaler = GuardedGradScaler(**grad_scaler_arguments(policy, device=device))
    return scaler if scaler.is_enabled() else None


class ScaledSteps:
    """What a framework's own step does with the scaler; without one everything passes through."""

    def __init__(self, scaler: GuardedGradScaler | None) -> None:
        self.scaler = scaler

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        return loss if self.scaler is None else self.scaler.scale(loss)

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Unscale the optimizer's gradients before a clipping, once a step."""
        if self.scaler is not None and _has_gradients(optimizer):
            self.scaler.unscale_once(optimizer)

    def step(self, optimizer: torch.optim.Optimizer, **arguments: Any) -> Any:
        """Step the optimizer and update the scale; without any gradient there is nothing to check or update.

        Raises:
            ApplyError: the optimizer needs a closure, which no grad scaler supports.
            ScaleCollapsedError: the loss scale runs to zero.
        """
        if self.scaler is None or not _has_gradients(optimizer):
            return optimizer.step(**arguments)
        if needs_closure(optimizer):
            raise ApplyError(
                f"{type(optimizer).__name__} evaluates the loss in a closure, which a grad scaler does not support;"
                " use a policy without FP16 or another optimizer"
            )
        self.scaler.unscale_once(optimizer)
        output = self.scaler.step(optimizer, **arguments)
        self.scaler.update()
        return output


def _has_gradients(optimizer: torch.optim.Optimizer) -> bool:
    return any(parameter.grad is not None for group in optimizer.param_groups for parameter in group["params"])
