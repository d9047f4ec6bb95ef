"""Install a policy on a model and take it off again: all or nothing, invisible to names, state dict and hooks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

from torch import nn
from torch.nn.parallel import DataParallel

from autoprec.apply.checkpointing import own_forward, set_own_forward
from autoprec.apply.layout import make_installations
from autoprec.apply.plan import half_masters, resolve_plan
from autoprec.apply.portability import check_device, warn_of_differences
from autoprec.apply.regions import PolicyForward, Region, Root
from autoprec.apply.structure import Structure, is_scripted, read_structure, unwrap
from autoprec.apply.training_options import warn_of_missing_options
from autoprec.apply.trees import CASTABLE
from autoprec.errors import ApplyError
from autoprec.policy import Policy

__all__ = ["apply_policy", "remove_policy", "suspend_policy", "applied_policy"]

ModuleT = TypeVar("ModuleT", bound=nn.Module)


def apply_policy(model: ModuleT, policy: Policy, *, strict: bool = True, lift_half_parameters: bool = False) -> ModuleT:
    """Install `policy` on `model`, in place; return the same model.

    Apply first, then wrap (torch.compile, DDP, fully_shard). Parameters stay as they are: FP32 masters that get the
    gradients. The root's floating outputs come back in FP32.

    Args:
        strict: refuse rules that match no module, and models that the policy was not made for; else warn.
        lift_half_parameters: turn trainable FP16 and BF16 parameters into FP32 masters; else they are refused.

    Raises:
        ApplyError: the policy does not fit; the model is unchanged.
    """
    if not isinstance(model, nn.Module):
        raise ApplyError(f"apply_policy takes an nn.Module, found {type(model).__name__}")
    if not isinstance(policy, Policy):
        raise ApplyError(f"apply_policy takes a Policy (see load_policy), found {type(policy).__name__}")
    structure = read_structure(model)
    _refuse_installed(model, structure)
    plan = resolve_plan(structure, policy, strict=strict)
    check_device(unwrap(model), plan.policy)
    halves = half_masters(structure)
    if halves and not lift_half_parameters:
        raise ApplyError(
            f"{len(halves)} trainable parameters are not float32 and cannot be masters: {', '.join(halves[:8])}"
            f"{' ...' if len(halves) > 8 else ''}; pass lift_half_parameters=True to make them float32"
        )
    installations = make_installations(plan, policy)
    warn_of_differences(unwrap(model), policy)
    warn_of_missing_options(model, policy)
    if halves:
        _lift(structure)
    for module, forward in installations:
        set_own_forward(module, forward)
    return model


def remove_policy(model: ModuleT) -> ModuleT:
    """Take the policy off; the model is bit for bit the bare one. Return the same model.

    Raises:
        ApplyError: no policy is installed, or a module's forward was wrapped by something else since.
    """
    installed = _installed(model)
    if not installed:
        raise ApplyError("no policy is installed on this model")
    _take_off(model, installed)
    for _, forward in installed:
        state = forward.args[1]
        if isinstance(state, Root):  # it refers to itself through these: the model would outlive its last name
            state.installed.clear()
            state.modules.clear()
    return model


@contextmanager
def suspend_policy(model: ModuleT) -> Iterator[ModuleT]:
    """Run the bare model inside the block (for FP32 validation, say), and the policy again after it.

    Raises:
        ApplyError: another policy was applied inside the block and not removed.
    """
    installed = _installed(model)
    _take_off(model, installed)
    try:
        yield model
    finally:
        if _installed(model):
            raise ApplyError("a policy was applied inside suspend_policy; remove it before the block ends")
        for module, forward in installed:
            _region_of(forward).wrap(own_forward(module))
            set_own_forward(module, forward)


def applied_policy(model: nn.Module) -> Policy | None:
    """Return the policy that is installed on the model, None where there is none."""
    forward = _forward_of(unwrap(model))
    return forward.args[1].policy if forward is not None and isinstance(forward.args[1], Root) else None


def _forward_of(module: nn.Module) -> PolicyForward | None:
    forward = own_forward(module)
    return forward if isinstance(forward, PolicyForward) else None


def _region_of(forward: PolicyForward) -> Region:
    state = forward.args[1]
    region: Region = state.region if isinstance(state, Root) else state
    return region


def _installed(model: nn.Module) -> list[tuple[nn.Module, PolicyForward]]:
    """Return what a policy installed on the model and on its parts, also on parts that have left the model since."""
    found: dict[int, tuple[nn.Module, PolicyForward]] = {}
    for module in unwrap(model).modules():
        forward = _forward_of(module)
        if forward is not None:
            found[id(forward)] = (module, forward)
            if isinstance(forward.args[1], Root):
                found |= {id(placed): (owner, placed) for owner, placed in forward.args[1].installed}
    return list(found.values())


def _take_off(model: nn.Module, installed: list[tuple[nn.Module, PolicyForward]]) -> None:
    names = {id(module): name for name, module in unwrap(model).named_modules()}
    wrapped = [
        names[id(module)] or "the model itself"
        for module, forward in installed
        if id(module) in names and own_forward(module) not in (None, forward)
    ]
    if wrapped:
        raise ApplyError(
            f"the forward of {', '.join(wrapped[:8])} was replaced after the policy was applied; undo that first"
        )
    for module, forward in installed:
        if own_forward(module) is forward:
            set_own_forward(module, _region_of(forward).inner)


def _refuse_installed(model: nn.Module, structure: Structure) -> None:
    for name, module in structure.unique():
        if _forward_of(module) is not None:
            place = f"module {name!r} of this model" if name else "this model"
            raise ApplyError(f"a policy is installed on {place} already; remove_policy first")
    if isinstance(model, DataParallel) and len(model.device_ids) > 1:
        raise ApplyError("DataParallel copies modules in a way no policy survives; use DistributedDataParallel")
    if is_scripted(unwrap(model)):
        raise ApplyError("the model is TorchScript, which runs no Python forward; apply the policy before scripting")


def _lift(structure: Structure) -> None:
    for _, module in structure.unique():
        for parameter in module._parameters.values():
            if parameter is not None and parameter.requires_grad and parameter.dtype in CASTABLE:
                parameter.data = parameter.data.float()
