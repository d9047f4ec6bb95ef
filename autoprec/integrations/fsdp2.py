"""A policy as FSDP2's own mixed precision: `fully_shard` with one `MixedPrecisionPolicy` a unit.

    shard_model(model, policy, mesh=mesh, units=["blocks.*"])     # instead of apply_policy and fully_shard
    optimizer = autoprec.build_optimizer(policy, torch.optim.AdamW, model.parameters(), lr=1e-3)
    scaler = autoprec.build_grad_scaler(policy)

FSDP2 then gathers half units in half. It casts parameters, inputs and outputs of a unit and knows no autocast and no
cast of buffers: what needs those is refused by name. `apply_policy` before `fully_shard` can express every policy, and
gathers FP32. Read in torch 2.14, `torch.distributed.fsdp`.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import translate
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from autoprec.apply import applied_policy, read_structure
from autoprec.apply.plan import Plan, half_masters, resolve_plan
from autoprec.apply.structure import has_forward, is_scripted
from autoprec.errors import ApplyError, PrecisionWarning, did_you_mean
from autoprec.formats import FORMATS
from autoprec.integrations.exported import Exported, as_json, listed
from autoprec.policy import Policy, Precision, is_glob, lies_in

__all__ = ["ShardedUnit", "describe_units", "plan_units", "shard_model"]

ModuleT = TypeVar("ModuleT", bound=nn.Module)

INSTEAD = "apply_policy before fully_shard can express it"


@dataclass(frozen=True, slots=True)
class ShardedUnit:
    """A module that gets a `fully_shard` of its own; "" is the model itself, whose outputs come back in FP32."""

    name: str
    precision: Precision

    def mixed_precision(self) -> MixedPrecisionPolicy:
        """Return the policy for `fully_shard`; gradients are reduced in FP32, as the masters take them."""
        known = FORMATS.get(self.precision)  # a mere sequence in autocast computes nothing and casts nothing
        dtype: torch.dtype | None = getattr(torch, known.torch_name) if known is not None else None
        output = torch.float32 if not self.name else dtype
        return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, output_dtype=output)


def plan_units(model: nn.Module, policy: Policy, *, units: Sequence[str] = ()) -> list[ShardedUnit]:
    """Return what `shard_model` would shard, parts before what they are in. Touches nothing.

    A module whose parts all have its precision is one unit; where precisions meet, each part is one as well.

    Args:
        units: names or globs of further modules to gather one at a time, such as "blocks.*".

    Raises:
        ApplyError: what FSDP2 cannot express, by name; a policy that does not fit; a name that matches nothing.
    """
    structure = read_structure(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PrecisionWarning)
        plan = resolve_plan(structure, policy)
    _check_model(model, plan)
    chosen = _matched(plan, units)
    found: list[ShardedUnit] = []
    _visit(plan, "", None, chosen, found)
    _refuse(plan, found)
    return found


def shard_model(
    model: ModuleT, policy: Policy, *, units: Sequence[str] = (), mesh: DeviceMesh | None = None, **settings: Any
) -> ModuleT:
    """Call `fully_shard` on each unit of the policy and on the model, in place; return the same model.

    Build the optimizer afterwards. A policy that is applied, or autocast around the model, would be a second precision
    and is refused.

    Args:
        units: as in `plan_units`.
        mesh: the device mesh; None takes the default one over all processes.
        settings: what else `fully_shard` takes (reshard_after_forward, offload_policy ...).

    Raises:
        ApplyError: as `plan_units`; `mp_policy` among the settings, which the policy decides.
    """
    if "mp_policy" in settings:
        raise ApplyError("mp_policy was given beside a policy, which decides it for each unit; leave one of them out")
    modules = read_structure(model).modules
    for unit in plan_units(model, policy, units=units):
        fully_shard(modules[unit.name], mesh=mesh, mp_policy=unit.mixed_precision(), **settings)
    model.register_forward_pre_hook(_refuse_autocast)
    return model


def describe_units(model: nn.Module, policy: Policy, *, units: Sequence[str] = ()) -> Exported:
    """Return the units as data: module -> arguments of `MixedPrecisionPolicy`, in the order to shard them."""
    data = {
        unit.name: {
            **{key: _name(getattr(mixed, key)) for key in ("param_dtype", "reduce_dtype", "output_dtype")},
            "cast_forward_inputs": mixed.cast_forward_inputs,
        }
        for unit, mixed in ((u, u.mixed_precision()) for u in plan_units(model, policy, units=units))
    }
    note = 'fully_shard in this order, "" is the model; autoprec.integrations.fsdp2.shard_model does it'
    return Exported(as_json(data), notes=(note,))


def _name(dtype: torch.dtype | None) -> str | None:
    return None if dtype is None else str(dtype).removeprefix("torch.")


def _check_model(model: nn.Module, plan: Plan) -> None:
    if applied_policy(model) is not None:
        raise ApplyError("the model has a policy already, which would cast a second time; remove_policy first")
    sharded = [name or "the model itself" for name, m in plan.structure.unique() if isinstance(m, FSDPModule)]
    if sharded:
        raise ApplyError(f"sharded already: {listed(sharded)}; shard_model takes the bare model")
    if model is not plan.structure.modules[""]:
        raise ApplyError(f"the model is wrapped in {type(model).__name__}; shard the model inside")
    halves = half_masters(plan.structure)
    if halves:
        raise ApplyError(f"trainable parameters must be FP32 masters, found half ones: {listed(halves)}")


def _matched(plan: Plan, units: Sequence[str]) -> set[str]:
    """Return the modules that names and globs mean; of a unit that cannot be split, the unit."""
    chosen: set[str] = set()
    names = plan.structure.modules
    for rule in units:
        pattern = re.compile(translate(rule))
        found = [rule] if rule in names else [n for n in names if is_glob(rule) and n and pattern.match(n)]
        found = [name for name in found if name not in plan.structure.governors and has_forward(names[name])]
        if not found:
            raise ApplyError(f"units: {rule!r} matches no module with a forward of its own{did_you_mean(rule, names)}")
        chosen.update(found)
    return chosen


def _visit(plan: Plan, name: str, around: Precision | None, chosen: set[str], found: list[ShardedUnit]) -> None:
    """Add the units at and below a module, parts first; `around` is the precision that its inputs come in for sure."""
    module, precision = plan.structure.modules[name], plan.precision(name)
    is_uniform = _precisions_in(plan, name) <= {precision}
    can_be = has_forward(module) and (precision != "autocast" or _computes(plan, name))
    is_unit = name == "" or (can_be and (name in chosen or precision != around or not is_uniform))
    inside = precision if is_uniform and (is_unit or precision == around) else None
    for child in _children(plan, name):
        _visit(plan, child, inside, chosen, found)
    if is_unit:
        found.append(ShardedUnit(name, precision))


def _children(plan: Plan, name: str) -> list[str]:
    return [
        child
        for child, parent in plan.structure.parents.items()
        if parent == name
        and child not in plan.structure.governors
        and plan.structure.names[id(plan.structure.modules[child])][0] == child
    ]


def _precisions_in(plan: Plan, name: str) -> set[Precision]:
    below = [n for n in plan.structure.modules if lies_in(n, name) and _computes(plan, n)]
    return {plan.precision(n) for n in below}


def _computes(plan: Plan, name: str) -> bool:
    """Whether a module has code or parameters of its own: a list of modules, or a mere sequence, has neither."""
    module = plan.structure.modules[name]
    is_sequence = type(module).forward is nn.Sequential.forward
    return name not in plan.structure.governors and (
        bool(module._parameters) or (has_forward(module) and not is_sequence)
    )


def _refuse(plan: Plan, found: list[ShardedUnit]) -> None:
    """Refuse, by name, what a `MixedPrecisionPolicy` cannot say."""
    problems: dict[str, list[str]] = {}
    for name, module in plan.structure.unique():
        precision = plan.precision(name)
        place = name or "the model itself"
        if precision == "autocast" and _computes(plan, name):
            problems.setdefault("autocast, which FSDP2 does not know", []).append(place)
        floating = any(b is not None and b.is_floating_point() for b in module._buffers.values())
        if precision in ("fp16", "bf16") and floating:
            problems.setdefault("half precision with floating buffers, which FSDP2 does not cast", []).append(place)
        if is_scripted(module):
            problems.setdefault("TorchScript, which fully_shard does not take", []).append(place)
    for names in _tied_across(plan, found):
        problems.setdefault("a weight tied across units that are sharded apart", []).append(" and ".join(names))
    if problems:
        what = "; ".join(f"{listed(names)}: {problem}" for problem, names in problems.items())
        raise ApplyError(f"FSDP2's mixed precision cannot express this policy: {what}; {INSTEAD}")


def _tied_across(plan: Plan, found: list[ShardedUnit]) -> list[list[str]]:
    """Return the modules that hold one parameter and lie in different units."""
    units = [unit.name for unit in found]
    holders: dict[int, dict[str, str]] = {}
    for name, module in plan.structure.unique():
        unit = max((each for each in units if lies_in(name, each)), key=len)
        for parameter in module._parameters.values():
            if parameter is not None:
                holders.setdefault(id(parameter), {})[name] = unit
    return [list(names) for names in holders.values() if len(set(names.values())) > 1]


def _refuse_autocast(module: nn.Module, args: Any) -> None:
    for device_type in {parameter.device.type for parameter in module.parameters()}:
        if torch.is_autocast_enabled(device_type):
            raise ApplyError(
                "torch.autocast is on around a model whose units have FSDP2's mixed precision, a second precision on "
                "top; leave the autocast block out"
            )
