"""The optimizer and the grad scaler of a policy."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from autoprec.errors import ApplyError, PrecisionWarning
from autoprec.policy import GradScalerSettings, OptimizerImplementation, Policy

__all__ = [
    "IMPLEMENTATIONS",
    "PolicyGradScaler",
    "build_grad_scaler",
    "build_optimizer",
    "chosen_settings",
    "configure_optimizer",
    "grad_scaler_arguments",
]

IMPLEMENTATIONS: Mapping[OptimizerImplementation, Mapping[str, bool]] = {
    "foreach": {"foreach": True},
    "fused": {"fused": True},
    "for-loop": {"foreach": False},
}
"""What torch.optim's classes take for each; a class without the argument has no such implementation."""


def build_optimizer(
    policy: Policy,
    optimizer: type[torch.optim.Optimizer],
    params: Iterable[Any],
    **settings: Any,
) -> torch.optim.Optimizer:
    """Build `optimizer(params, **settings)` with the policy's eps and amsgrad where the class has them.

    An implementation (foreach, fused, for-loop) that the policy was found with is taken, too. Groups in `params` and
    keyword arguments that state one of these themselves keep theirs (with a warning). A state
    dict loaded later keeps the policy's values too, and says what differed. A setting that the class does not have is
    left out with a warning.
    """
    params = list(params)
    chosen = chosen_settings(policy, optimizer, params, settings)
    built = optimizer(params, **settings, **chosen)
    _keep_on_load(built, chosen)
    return built


def chosen_settings(
    policy: Policy, optimizer: type[torch.optim.Optimizer], params: list[Any], settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Return what the policy adds to `optimizer(params, **settings)`; warn of what it cannot, or must not, decide."""
    accepted = inspect.signature(optimizer).parameters
    wanted = _optimizer_settings(policy)
    for key, value in wanted.items():
        stated = [owner[key] for owner in (settings, *_groups(params)) if key in owner and owner[key] != value]
        if key not in accepted:
            _warn(f"{optimizer.__name__} has no {key}: the policy's {key}={value!r} is not used", stacklevel=4)
        elif not takes_value(accepted[key].default, value):
            _warn(f"{_other_kind(optimizer, key, accepted[key].default)}: {value!r} is not used", stacklevel=4)
        elif stated:
            _warn(f"{key}={stated[0]!r} was asked for; the policy says {value!r}: keeping {stated[0]!r}", stacklevel=4)
    return {
        key: value
        for key, value in wanted.items()
        if key in accepted and key not in settings and takes_value(accepted[key].default, value)
    }


def takes_value(default: Any, value: Any) -> bool:
    """Whether a value is of the kind that an optimizer's own default has: Adafactor's eps is a pair, and no float."""
    if default in (None, inspect.Parameter.empty):
        return True
    numbers = (int, float)
    if isinstance(value, bool) or isinstance(default, bool):
        return isinstance(value, bool) and isinstance(default, bool)
    return isinstance(default, numbers) if isinstance(value, numbers) else type(value) is type(default)


def _other_kind(optimizer: type, key: str, default: Any) -> str:
    return f"{key} of {optimizer.__name__} is {default!r} by default and of another kind than the policy's"


def configure_optimizer(policy: Policy, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Give an optimizer that somebody else built (a framework) the policy's eps, amsgrad and implementation, in place.

    Unlike `build_optimizer`, whatever its groups say: who built it could not know the policy. A setting that the class
    does not have is left out with a warning. May be called at any time, also after a state was loaded.
    """
    wanted = _optimizer_settings(policy)
    missing = [key for key in wanted if key not in optimizer.defaults]
    if missing:
        named = ", ".join(f"{key}={wanted[key]!r}" for key in missing)
        _warn(f"{type(optimizer).__name__} has no {' or '.join(missing)}: the policy's {named} is not used")
    for key in wanted.keys() - set(missing):
        if not takes_value(optimizer.defaults[key], wanted[key]):
            missing.append(key)
            _warn(f"{_other_kind(type(optimizer), key, optimizer.defaults[key])}: {wanted[key]!r} is not used")
    chosen = {key: value for key, value in wanted.items() if key not in missing}
    for group in optimizer.param_groups:
        group.update(chosen)
        if chosen.get("amsgrad"):
            _start_amsgrad(optimizer, group)
    _keep_on_load(optimizer, chosen)
    return optimizer


def build_grad_scaler(policy: Policy, *, device: str | torch.device | None = None) -> PolicyGradScaler:
    """Build the policy's grad scaler, switched off where the policy uses no FP16: one loop serves all policies.

    Args:
        device: where the model trains; None takes the current accelerator, else the CPU.

    Raises:
        ApplyError: the device is not there (torch's own scaler would switch itself off with no more than a warning).
    """
    return PolicyGradScaler(**grad_scaler_arguments(policy, device=device))


def grad_scaler_arguments(policy: Policy, *, device: str | torch.device | None = None) -> dict[str, Any]:
    """Return what torch's `GradScaler` takes for the policy; arguments and errors are those of `build_grad_scaler`."""
    if device is None:
        device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    kind = torch.device(device).type
    if kind == "cuda" and not torch.cuda.is_available():
        raise ApplyError("a grad scaler for 'cuda' was asked for and no CUDA device is there; allowed here: 'cpu'")
    settings = policy.grad_scaler or GradScalerSettings()
    return {"device": kind, "enabled": policy.needs_grad_scaler, **settings.model_dump()}


class PolicyGradScaler(torch.amp.GradScaler):
    """torch's GradScaler that keeps the policy's factors when an older state is loaded; the scale is the state's."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the scale and its growth tracker; say which of the policy's numbers the state would have changed."""
        if not self.is_enabled():
            return
        if not state_dict:
            message = "the state is of a grad scaler that was switched off; the policy's own starts afresh"
            warnings.warn(message, PrecisionWarning, stacklevel=2)
            return
        own = {
            "growth_factor": self.get_growth_factor(),
            "backoff_factor": self.get_backoff_factor(),
            "growth_interval": self.get_growth_interval(),
        }
        super().load_state_dict({**state_dict, **own})
        changed = [f"{k} {state_dict[k]} -> {v}" for k, v in own.items() if state_dict.get(k, v) != v]
        if changed:
            message = f"kept the policy's grad scaler settings: {', '.join(changed)}"
            warnings.warn(message, PrecisionWarning, stacklevel=2)


def _keep_on_load(optimizer: torch.optim.Optimizer, chosen: Mapping[str, Any]) -> None:
    """Let a state dict that is loaded later leave the chosen settings as they are."""
    if chosen:
        own = [{key: group[key] for key in chosen} for group in optimizer.param_groups]
        optimizer.register_load_state_dict_post_hook(lambda loaded: _keep_settings(loaded, own))


def _groups(params: list[Any]) -> list[dict[str, Any]]:
    return [group for group in params if isinstance(group, dict)]


def _warn(message: str, *, stacklevel: int = 3) -> None:
    warnings.warn(message, PrecisionWarning, stacklevel=stacklevel)


def _optimizer_settings(policy: Policy) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    if policy.optimizer is not None:
        settings = {"eps": policy.optimizer.eps, "amsgrad": policy.optimizer.amsgrad}
    if policy.training is not None and policy.training.optimizer_implementation is not None:
        settings |= IMPLEMENTATIONS[policy.training.optimizer_implementation]
    return {key: value for key, value in settings.items() if value is not None}


def _keep_settings(optimizer: torch.optim.Optimizer, own: list[dict[str, Any]]) -> None:
    changed: list[str] = []
    for group, settings in zip(optimizer.param_groups, own, strict=True):
        for key, value in settings.items():
            if group.get(key) != value:
                changed.append(f"{key} {group.get(key)} -> {value}")
                group[key] = value
        if settings.get("amsgrad"):
            _start_amsgrad(optimizer, group)
    if changed:
        message = f"kept the policy's optimizer settings: {', '.join(dict.fromkeys(changed))}"
        warnings.warn(message, PrecisionWarning, stacklevel=3)


def _start_amsgrad(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> None:
    """A state saved without amsgrad has no maximum yet: it starts from the second moment that is there."""
    for parameter in group["params"]:
        state = optimizer.state.get(parameter, {})
        if "exp_avg_sq" in state and "max_exp_avg_sq" not in state:
            state["max_exp_avg_sq"] = state["exp_avg_sq"].clone()
