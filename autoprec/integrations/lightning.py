"""Lightning and Fabric: precision plugins that train under a policy.

    trainer = lightning.Trainer(plugins=PolicyPrecision("policy.json"))
    fabric = lightning.Fabric(plugins=FabricPolicyPrecision("policy.json"))

Needs the extra: pip install 'autoprec[lightning]'.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from weakref import WeakSet

import torch
from torch import nn

from autoprec.apply import configure_optimizer, remove_policy
from autoprec.apply.structure import unwrap
from autoprec.errors import ApplyError, PrecisionWarning, did_you_mean
from autoprec.integrations.scaling import GuardedGradScaler, ScaledSteps, build_guarded_scaler
from autoprec.integrations.setting import Evaluation, PolicyLike, PolicySetting, device_of, without_extra
from autoprec.policy import Policy

try:
    from lightning.fabric.plugins.precision import Precision as FabricPrecision
    from lightning.pytorch.plugins.precision import Precision
    from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
except ImportError as error:
    raise without_extra("Lightning", "lightning") from error

__all__ = ["FabricPolicyPrecision", "PolicyPrecision"]

_STRATEGIES = (SingleDeviceStrategy, DDPStrategy)


class _PolicyPlugin:
    """What both plugins share: the setting, the scaler and its state."""

    setting: PolicySetting
    steps: ScaledSteps
    _state: dict[str, Any]

    def __init__(self, policy: PolicyLike, **others: Any) -> None:
        self.setting = PolicySetting.of(policy, **others)
        self.steps = ScaledSteps(None)
        self._state = {}

    @property
    def policy(self) -> Policy:
        """The policy that is trained under."""
        return self.setting.policy

    @property
    def scaler(self) -> GuardedGradScaler | None:
        """The policy's grad scaler; None before the training is set up, and where the policy has no FP16."""
        return self.steps.scaler

    def state_dict(self) -> dict[str, Any]:
        """Return the rules that were trained under, and the state of the grad scaler."""
        state = self.scaler.state_dict() if self.scaler is not None else {}
        return {"policy": _rules(self.policy), "grad_scaler": state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up the scale and its growth tracker; say where the checkpoint was trained under other rules."""
        if state_dict.get("policy", _rules(self.policy)) != _rules(self.policy):
            message = "the checkpoint was trained under another policy; it goes on under the plugin's own"
            warnings.warn(message, PrecisionWarning, stacklevel=2)
        self._state = state_dict.get("grad_scaler", {})
        if self.scaler is not None and self._state:
            self.scaler.load_state_dict(self._state)

    def _start_scaler(self, device: torch.device) -> None:
        self.steps = ScaledSteps(build_guarded_scaler(self.policy, device=device))
        if self.scaler is not None and self._state:
            self.scaler.load_state_dict(self._state)


class PolicyPrecision(_PolicyPlugin, Precision):
    """A policy as the precision of a Lightning `Trainer`: `Trainer(plugins=PolicyPrecision("policy.json"))`.

    The policy is applied when a fit, validation, test or prediction is set up, and taken off again when it ends; one
    that is on the model already stays there and must be the same. The scaler's state is part of the checkpoint. The
    optimizers get the policy's eps and amsgrad, whatever they were built with.

    Args:
        policy: a `Policy`, or the path of its file.
        module: the submodule whose names the policy has ("model" for one found on `self.model`); "" is the
            LightningModule itself.
        evaluation: "policy", or "fp32" to validate, test and predict without the policy.
        emulates: emulate half precision on a CPU; None where the policy has FP16, with a warning that says so.
        lift_half_parameters: turn trainable FP16 and BF16 parameters into FP32 masters; else they are refused.

    Raises (when the training is set up):
        ApplyError: the policy does not fit, the model has another one, or a strategy shards the model or brings a
            precision of its own; allowed: a single device and DDP.
    """

    def __init__(
        self,
        policy: PolicyLike,
        *,
        module: str = "",
        evaluation: Evaluation = "policy",
        emulates: bool | None = None,
        lift_half_parameters: bool = False,
    ) -> None:
        super().__init__(policy, evaluation=evaluation, emulates=emulates, lift_half_parameters=lift_half_parameters)
        self.module = module
        self._target: nn.Module | None = None
        self._applied_here = False

    def connect(self, model: nn.Module, optimizers: list[Any], lr_schedulers: list[Any]) -> tuple[Any, Any, Any]:
        """Apply the policy to the model, which is on its device and wrapped; configure the optimizers."""
        inner: Any = unwrap(model)
        _check_strategy(inner.trainer.strategy)
        target = self._find(inner)
        self._applied_here = self.setting.install(target)
        self._target = target
        if self.scaler is None:  # one for all that this Trainer does: a checkpoint after a validation has it still
            self._start_scaler(device_of(target))
        for optimizer in optimizers:
            if isinstance(optimizer, torch.optim.Optimizer):
                configure_optimizer(self.policy, optimizer)
        return model, optimizers, lr_schedulers

    def teardown(self) -> None:
        """Take off the policy that `connect` applied."""
        target, self._target = self._target, None
        if target is not None and self._applied_here:
            self._applied_here = False
            remove_policy(target)

    @contextmanager
    def forward_context(self) -> Iterator[None]:
        """Emulate where that was asked for; refuse autocast around it."""
        with self._computing():
            yield

    @contextmanager
    def val_step_context(self) -> Iterator[None]:
        """Compute a validation step under the policy or without it."""
        with self._computing(), self.setting.evaluating(self._model()):
            yield

    test_step_context = val_step_context
    predict_step_context = val_step_context

    def pre_backward(self, tensor: torch.Tensor, module: Any) -> Any:
        """Scale the loss, then call the hooks of Lightning."""
        return super().pre_backward(self.steps.scale(tensor), module)

    def backward(self, tensor: torch.Tensor, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        """Run backward in the arithmetic of the forward."""
        with self._computing():
            super().backward(tensor, model, optimizer, *args, **kwargs)

    def optimizer_step(self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any) -> Any:
        """Run the closure (forward and backward), unscale, call hooks and clip, then step and update the scale."""
        if self.scaler is None:
            return super().optimizer_step(optimizer, model=model, closure=closure, **kwargs)
        result = closure()
        self.steps.unscale(optimizer)
        self._after_closure(model, optimizer)
        if result is None and model.automatic_optimization:  # training_step left this batch out
            return result
        return self.steps.step(optimizer, **kwargs)

    def clip_gradients(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        """Clip unscaled gradients, also where a manual optimization clips before its step."""
        self.steps.unscale(_inner(optimizer))
        super().clip_gradients(optimizer, *args, **kwargs)

    def _computing(self) -> AbstractContextManager[Any]:
        return self.setting.computing(device_of(self._model()))

    def _model(self) -> nn.Module:
        if self._target is None:
            raise ApplyError("PolicyPrecision computes inside a Trainer's fit, validate, test or predict only")
        return self._target

    def _find(self, model: nn.Module) -> nn.Module:
        try:
            return model.get_submodule(self.module)
        except AttributeError:
            names = [name for name, _ in model.named_modules() if name]
            raise ApplyError(
                f"{type(model).__name__} has no submodule {self.module!r}{did_you_mean(self.module, names)}"
            ) from None


class FabricPolicyPrecision(_PolicyPlugin, FabricPrecision):
    """A policy as the precision of Fabric: `Fabric(plugins=FabricPolicyPrecision("policy.json"))`.

    `fabric.setup(model, optimizer)` applies the policy, `fabric.backward` scales, `optimizer.step` unscales, steps and
    updates; the optimizer gets the policy's eps and amsgrad before its first step. Fabric saves what it is given, so
    put the plugin into the state: `fabric.save(path, {"model": model, "optimizer": optimizer, "precision": plugin})`.

    Args:
        policy: a `Policy`, or the path of its file.
        emulates: emulate half precision on a CPU; None where the policy has FP16, with a warning that says so.
        lift_half_parameters: turn trainable FP16 and BF16 parameters into FP32 masters; else they are refused.

    Raises (from `fabric.setup`; from the first forward where the model moves to a GPU meanwhile):
        ApplyError: the policy does not fit, or the model has another one.
    """

    def __init__(self, policy: PolicyLike, *, emulates: bool | None = None, lift_half_parameters: bool = False) -> None:
        super().__init__(policy, emulates=emulates, lift_half_parameters=lift_half_parameters)
        self._waiting: list[nn.Module] = []
        self._configured: WeakSet[Any] = WeakSet()
        self._device = torch.device("cpu")

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Apply the policy; a module that is about to move to a GPU gets it there, where that device can be checked."""
        self._waiting.append(module)
        if not torch.accelerator.is_available() or device_of(module).type != "cpu":
            self._install_waiting()
        return module

    def convert_input(self, data: Any) -> Any:
        """Leave inputs as they are: each unit casts its own."""
        self._install_waiting()
        return data

    def forward_context(self) -> AbstractContextManager[Any]:
        """Emulate where that was asked for; refuse autocast around it."""
        return self.setting.computing(self._device)

    def backward(self, tensor: torch.Tensor, model: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        """Scale the loss and run backward in the arithmetic of the forward."""
        with self.setting.computing(self._device):
            super().backward(self.steps.scale(tensor), model, *args, **kwargs)

    def unscale_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Unscale before a clipping, once a step."""
        self.steps.unscale(_inner(optimizer))

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        """Unscale, step and update the scale."""
        if optimizer not in self._configured:
            self._configured.add(optimizer)
            configure_optimizer(self.policy, optimizer)
        return self.steps.step(optimizer, **kwargs)

    def _install_waiting(self) -> None:
        while self._waiting:
            module = self._waiting.pop()
            self.setting.install(module)
            self._device = device_of(module)
            if self.scaler is None:
                self._start_scaler(self._device)


def _inner(optimizer: Any) -> torch.optim.Optimizer:
    """Return the optimizer inside Lightning's wrapper."""
    return getattr(optimizer, "_optimizer", optimizer)  # type: ignore[no-any-return]


def _rules(policy: Policy) -> dict[str, Any]:
    return {"default": policy.default, "dtype": policy.dtype, "modules": dict(policy.modules)}


def _check_strategy(strategy: Any) -> None:
    if not isinstance(strategy, _STRATEGIES):
        raise ApplyError(
            f"PolicyPrecision does not go with {type(strategy).__name__}, which shards the model or brings a precision"
            " of its own; allowed: one device, and DDP"
        )
