"""Accelerate: an `Accelerator` that trains under a policy.

    accelerator = PolicyAccelerator("policy.json")
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

Needs the extra: pip install 'autoprec[accelerate]'.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from autoprec.apply import configure_optimizer
from autoprec.apply.structure import unwrap
from autoprec.errors import ApplyError
from autoprec.integrations.scaling import GuardedGradScaler, build_guarded_scaler
from autoprec.integrations.setting import PolicyLike, PolicySetting, without_extra

try:
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.utils import DistributedType
except ImportError as error:
    raise without_extra("Accelerate", "accelerate") from error

__all__ = ["PolicyAccelerator"]

_ALLOWED = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
"""One process, or DDP; the others shard the model or bring a precision of their own."""


class PolicyAccelerator(Accelerator):
    """Accelerate's `Accelerator` under a policy; the loop stays what it is.

    `prepare` applies the policy before it wraps a model, and gives optimizers the policy's eps and amsgrad. The grad
    scaler is the policy's: `backward` scales, clipping unscales, `step` skips, `save_state` and `load_state` keep it.
    To evaluate in FP32: `with autoprec.suspend_policy(accelerator.unwrap_model(model)):`.

    Args:
        policy: a `Policy`, or the path of its file.
        emulates: emulate half precision on a CPU; None where the policy has FP16, with a warning that says so.
        lift_half_parameters: turn trainable FP16 and BF16 parameters into FP32 masters; else they are refused.
        arguments: of `Accelerator`.

    Raises:
        ApplyError: a second precision setting (`mixed_precision`, also from the environment or `accelerate config`; an
            autocast or scaler handler), or sharding; from `prepare`: the policy does not fit the model.
    """

    setting: PolicySetting
    scaler: GuardedGradScaler | None

    def __init__(
        self, policy: PolicyLike, *, emulates: bool | None = None, lift_half_parameters: bool = False, **arguments: Any
    ) -> None:
        setting = PolicySetting.of(policy, emulates=emulates, lift_half_parameters=lift_half_parameters)
        super().__init__(**arguments)
        self._use(setting)

    @classmethod
    def adopt(cls, accelerator: Accelerator, setting: PolicySetting) -> PolicyAccelerator:
        """Turn an accelerator that a framework built into this class, in place, before it has prepared anything."""
        accelerator.__class__ = cls
        adopted: PolicyAccelerator = accelerator
        adopted._use(setting)
        return adopted

    def _use(self, setting: PolicySetting) -> None:
        if self.distributed_type not in _ALLOWED:
            allowed = ", ".join(each.value for each in _ALLOWED)
            raise ApplyError(
                f"PolicyAccelerator does not go with {self.distributed_type.value}, which shards the model or brings a"
                f" precision of its own; allowed: {allowed}"
            )
        if self.mixed_precision != "no":
            raise ApplyError(
                f"mixed_precision is {self.mixed_precision!r} (an argument, ACCELERATE_MIXED_PRECISION or `accelerate"
                " config`), a second precision setting beside the policy; allowed: 'no'"
            )
        handlers = {"AutocastKwargs": self.autocast_handler, "GradScalerKwargs": self.scaler_handler}
        for name, handler in handlers.items():
            if handler is not None:
                raise ApplyError(f"{name} is a second precision setting beside the policy, which has its own numbers")
        self.setting = setting
        self.scaler = build_guarded_scaler(setting.policy, device=self.device)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Apply the policy where the model will run, then wrap the model as Accelerate does."""
        if self.device_placement if device_placement is None else device_placement:
            model.to(self.device)
        self.setting.install(model)
        inner = unwrap(model)
        if self.setting.emulates_on(self.device) and not hasattr(inner, _MARK):
            setattr(inner, _MARK, _EmulatedForward(self.setting, self.device).attach(inner))
        return super().prepare_model(model, device_placement, evaluation_mode)  # type: ignore[no-any-return]

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> Any:
        """Give the optimizer the policy's settings, then wrap it as Accelerate does."""
        configure_optimizer(self.setting.policy, _inner(optimizer))
        return super().prepare_optimizer(optimizer, device_placement)

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Scale the loss and run backward in the arithmetic of the forward."""
        with self.setting.computing(self.device):
            super().backward(loss, **kwargs)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Unscale the gradients of one optimizer, several, or all that were prepared: once a step."""
        if self.scaler is not None:
            given = self._optimizers if optimizer is None else optimizer
            for each in given if isinstance(given, list | tuple) else [given]:
                self.scaler.unscale_once(_inner(each))


_MARK = "_autoprec_emulated_forward"


class _EmulatedForward:
    """Hooks that put a model's forward into the emulation: the loop that calls the model is the user's."""

    def __init__(self, setting: PolicySetting, device: torch.device) -> None:
        self.setting = setting
        self.device = device
        self.open: list[AbstractContextManager[Any]] = []

    def attach(self, model: nn.Module) -> _EmulatedForward:
        model.register_forward_pre_hook(self._enter, prepend=True)
        model.register_forward_hook(self._leave, always_call=True)
        return self

    def _enter(self, module: nn.Module, inputs: Any) -> None:
        context = self.setting.computing(self.device)
        context.__enter__()
        self.open.append(context)

    def _leave(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if self.open:  # nothing is where `_enter` itself raised
            self.open.pop().__exit__(None, None, None)


def _inner(optimizer: Any) -> torch.optim.Optimizer:
    """Return the optimizer inside Accelerate's wrappers."""
    while isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    return optimizer  # type: ignore[no-any-return]
