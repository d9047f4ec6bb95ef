"""Install a policy on a model and take it off again: all or nothing, invisible to names, state dict and hooks."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.parallel import DataParallel

from autoprec.apply.losses import calls_a_loss
from autoprec.apply.plan import Plan, half_masters, resolve_plan
from autoprec.apply.portability import check_device, warn_of_differences
from autoprec.apply.regions import Lock, Region, Root, run_region, run_root
from autoprec.apply.shadow import owns_tensors
from autoprec.apply.structure import Structure, has_forward, is_scripted, read_structure, unwrap
from autoprec.apply.trees import CASTABLE
from autoprec.errors import ApplyError
from autoprec.formats import FORMATS
from autoprec.policy import Policy, Precision

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
    warn_of_differences(unwrap(model), policy)
    if halves:
        _lift(structure)
    for module, call, state in _installations(plan, policy):
        module.__dict__["forward"] = functools.partial(call, module, state)
    return model


def remove_policy(model: ModuleT) -> ModuleT:
    """Take the policy off; the model is bit for bit the bare one. Return the same model.

    Raises:
        ApplyError: no policy is installed.
    """
    if applied_policy(model) is None:
        raise ApplyError("no policy is installed on this model")
    for module, _, state in list(_installed(model)):
        inner = state.region.inner if isinstance(state, Root) else state.inner
        if inner is None:
            del module.__dict__["forward"]
        else:
            module.__dict__["forward"] = inner
    return model


@contextmanager
def suspend_policy(model: ModuleT) -> Iterator[ModuleT]:
    """Run the bare model inside the block (for FP32 validation, say), and the policy again after it."""
    taken = list(_installed(model))
    if taken:
        remove_policy(model)
    try:
        yield model
    finally:
        for module, call, state in taken:
            region = state.region if isinstance(state, Root) else state
            region.inner = module.__dict__.get("forward", None)
            module.__dict__["forward"] = functools.partial(call, module, state)


def applied_policy(model: nn.Module) -> Policy | None:
    """Return the policy that is installed on the model, None where there is none."""
    state = _state(unwrap(model))
    return state.policy if isinstance(state, Root) else None


def _state(module: nn.Module) -> Root | Region | None:
    forward = module.__dict__.get("forward")
    if isinstance(forward, functools.partial) and forward.func in (run_root, run_region):
        state: Root | Region = forward.args[1]
        return state
    return None


def _installed(model: nn.Module) -> Iterator[tuple[nn.Module, Any, Root | Region]]:
    for module in unwrap(model).modules():
        state = _state(module)
        if state is not None:
            yield module, module.__dict__["forward"].func, state


def _refuse_installed(model: nn.Module, structure: Structure) -> None:
    for name, module in structure.unique():
        if _state(module) is not None:
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


def _installations(plan: Plan, policy: Policy) -> list[tuple[nn.Module, Any, Root | Region]]:
    """Make every region of the plan; pure, so that nothing is installed unless all of them can be made."""
    lock = Lock()
    regions = {name: _region(plan, name, lock) for name in _places(plan)}
    written: dict[int, set[str]] = {}
    for name, region in regions.items():
        if _casts_weights(plan, name):
            region.members = [(m, written.setdefault(id(m), set())) for m in _members(plan, name)]
            region.owns_tensors = owns_tensors(plan.structure.modules[name])
    result: list[tuple[nn.Module, Any, Root | Region]] = []
    for name, region in regions.items():
        module = plan.structure.modules[name]
        result.append((module, run_region, region) if name else (module, run_root, _root(plan, policy, region)))
    return result


def _root(plan: Plan, policy: Policy, region: Region) -> Root:
    used = set(plan.precisions.values()) | {region.precision}
    low = {plan.policy.dtype if precision == "autocast" else precision for precision in used}
    return Root(
        policy=policy,
        region=region,
        uses_autocast="autocast" in used,
        uses_fp16="fp16" in low,
        autocast_dtype=_dtype(plan.policy.dtype),
    )


def _places(plan: Plan) -> list[str]:
    """The modules whose forward is replaced."""
    default = plan.precision("")
    mixed = len(set(plan.precisions.values())) > 1
    places = []
    for name, module in plan.structure.unique():
        if name == "":
            places.append(name)
            continue
        if not has_forward(module) or is_scripted(module) or name in plan.structure.governors:
            continue
        precision = plan.precision(name)
        parents = [plan.structure.calling_parent(alias) for alias in plan.structure.names[id(module)]]
        border = any(parent is None or plan.precision(parent) != precision for parent in parents)
        casts = _casts_weights(plan, name) and owns_tensors(module)
        special = _without_fastpath(plan, name) or _protects_losses(plan, name) or _runs_needed(plan, name)
        casts_inputs = mixed and precision != "autocast"
        if precision != default or border or casts or casts_inputs or special:
            places.append(name)
    return places


def _region(plan: Plan, name: str, lock: Lock) -> Region:
    module = plan.structure.modules[name]
    precision = plan.precision(name)
    return Region(
        precision=precision,
        dtype=_dtype(plan.policy.dtype if precision == "autocast" else precision),
        inner=module.__dict__.get("forward"),
        lock=lock,
        runs=_runs(plan, name, lock) if _runs_needed(plan, name) else None,
        protect_losses=_protects_losses(plan, name),
        without_fastpath=_without_fastpath(plan, name),
    )


def _casts_weights(plan: Plan, name: str) -> bool:
    """A half region casts weights; an fp32 one only where (frozen) weights are not FP32."""
    precision = plan.precision(name)
    if precision in ("fp16", "bf16"):
        return True
    tensors = [*plan.structure.modules[name].parameters(), *plan.structure.modules[name].buffers()]
    return precision == "fp32" and any(t.dtype in CASTABLE - {torch.float32} for t in tensors)


def _members(plan: Plan, name: str) -> list[nn.Module]:
    precision = plan.precision(name)
    members = [plan.structure.modules[name]]

    def collect(module: nn.Module) -> None:
        for child_name, child in module._modules.items():
            child = unwrap(child) if child is not None else None
            if child is None or child_name == "parametrizations" or is_scripted(child):
                continue
            if plan.precisions[id(child)] == precision and child not in members:
                members.append(child)
                collect(child)

    collect(members[0])
    return [members[0]] + [member for member in members[1:] if owns_tensors(member)]


def _runs_needed(plan: Plan, name: str) -> bool:
    module = plan.structure.modules[name]
    if type(module).forward is not nn.Sequential.forward or "forward" in module.__dict__:
        return False
    inside = [plan.precisions[id(unwrap(child))] for child in module._modules.values() if child is not None]
    return len(inside) == len(module._modules) and any(precision != plan.precision(name) for precision in inside)


def _runs(plan: Plan, name: str, lock: Lock) -> list[tuple[list[str], Region]]:
    runs: list[tuple[list[str], Region]] = []
    for child_name, child in plan.structure.modules[name]._modules.items():
        precision: Precision = plan.precisions[id(unwrap(child))]  # type: ignore[arg-type]
        if runs and runs[-1][1].precision == precision:
            runs[-1][0].append(child_name)
        else:
            dtype = _dtype(plan.policy.dtype if precision == "autocast" else precision)
            runs.append(([child_name], Region(precision=precision, dtype=dtype, lock=lock)))
    return runs


def _protects_losses(plan: Plan, name: str) -> bool:
    module = plan.structure.modules[name]
    return plan.precision(name) in ("fp16", "bf16") and bool(module._modules) and calls_a_loss(type(module))


def _without_fastpath(plan: Plan, name: str) -> bool:
    module = plan.structure.modules[name]
    if not isinstance(module, (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention)):
        return False
    inside = {plan.precisions[id(unwrap(m))] for m in module.modules() if id(unwrap(m)) in plan.precisions}
    return inside != {"fp32"}


def _dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, FORMATS[name].torch_name)
    return dtype
