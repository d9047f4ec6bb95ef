"""Resolve a policy for a model: which module gets which precision, or why the policy does not fit. Touches nothing."""

from __future__ import annotations

import hashlib
import inspect
import re
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import translate

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from autoprec.apply.losses import is_loss_module
from autoprec.apply.structure import Structure, is_scripted, without_prefixes
from autoprec.apply.trees import CASTABLE
from autoprec.errors import ApplyError, PrecisionWarning, did_you_mean
from autoprec.policy import ModelInfo, ModuleInfo, Policy, Precision, is_glob, lies_in, resolve_precisions

__all__ = ["Plan", "resolve_plan", "describe_model", "half_masters", "named_as_here"]


@dataclass(slots=True)
class Plan:
    """The precision of each module (by id), all checks passed."""

    structure: Structure
    policy: Policy
    precisions: dict[int, Precision]

    def precision(self, name: str) -> Precision:
        return self.precisions[id(self.structure.modules[name])]


def resolve_plan(structure: Structure, policy: Policy, *, strict: bool = True) -> Plan:
    """Resolve and check a policy.

    Raises:
        ApplyError: a rule matches nothing (strict), names a part of a single unit, gives one module or one tied weight
            two precisions, or a module has another type than the policy was made for.
    """
    policy = named_as_here(structure, policy)
    policy = policy.replace(modules=_normalized_rules(structure, policy))
    _check_rules(structure, policy, strict=strict)
    if policy.model is not None:
        _check_model(structure, policy.model, strict=strict)
    by_name, rules = resolve_precisions(policy, structure.parents)
    for name, governor in structure.governors.items():
        by_name[name], rules[name] = by_name[governor], rules[governor]
    for name, module in structure.modules.items():
        if is_loss_module(module) and rules[name] != name:
            for part in structure.modules:
                rule = rules[part]
                if lies_in(part, name) and (part == name or rule is None or not lies_in(rule, name)):
                    by_name[part] = "fp32"
    precisions = {id(m): _of_aliases(structure.names[id(m)], by_name, rules) for _, m in structure.unique()}
    plan = Plan(structure, policy, precisions)
    _check_tied(plan)
    _check_scripted(plan)
    _check_async(plan)
    return plan


def describe_model(structure: Structure, name: str) -> ModelInfo:
    """Return what a policy remembers of a model: a fingerprint of names and types, and the shapes of its parameters."""
    modules = {
        path: ModuleInfo(type=_type_name(module), parameters=_shapes(module))
        for path, module in structure.modules.items()
        if path and path not in structure.governors and not module._modules
    }
    lines = "\n".join(f"{path}:{_type_name(module)}" for path, module in structure.modules.items())
    return ModelInfo(name=name, fingerprint=hashlib.sha256(lines.encode()).hexdigest()[:16], modules=modules)


def half_masters(structure: Structure) -> list[str]:
    """Return the names of trainable parameters in FP16 or BF16: they cannot be masters."""
    return [
        f"{name}.{key}" if name else key
        for name, module in structure.unique()
        for key, parameter in module._parameters.items()
        if parameter is not None and parameter.requires_grad and parameter.dtype in CASTABLE - {torch.float32}
    ]


def _normalized_rules(structure: Structure, policy: Policy) -> dict[str, Precision]:
    rules: dict[str, Precision] = {}
    origin: dict[str, str] = {}
    for rule, precision in policy.modules.items():
        if rule in structure.modules:
            known = rule
        elif not is_glob(rule):
            known = without_prefixes(rule)
        elif not _matches(rule, structure.modules):
            known = without_prefixes(rule) or rule
        else:
            known = rule
        if known in rules and rules[known] != precision:
            raise ApplyError(
                f"rules {origin[known]!r} ({rules[known]}) and {rule!r} ({precision}) name the same module {known!r}"
            )
        rules[known or rule], origin[known or rule] = precision, rule
    return rules


def named_as_here(structure: Structure, policy: Policy) -> Policy:
    """Return a policy that was found on the network inside this model with names as they are here.

    So it is where every module that the policy knows, with its type, is here below one and the same module, and none at
    its own name. A policy without a list of modules is left as it is.
    """
    modules = policy.model.modules if policy.model is not None else {}
    prefix, num_found = _network_inside(structure, modules)
    if policy.model is None or not prefix or num_found < len(modules):
        return policy
    if not all(
        info.type in _type_names(structure.modules[f"{prefix}.{without_prefixes(name)}"])
        for name, info in modules.items()
    ):
        return policy
    model = policy.model.model_copy(update={"modules": {f"{prefix}.{name}": info for name, info in modules.items()}})
    return policy.replace(modules={f"{prefix}.{rule}": p for rule, p in policy.modules.items()}, model=model)


def _network_inside(structure: Structure, names: Iterable[str]) -> tuple[str, int]:
    """Return the module below which most of the names are that this model does not have itself, and how many."""
    paths = [path for name in names if (path := without_prefixes(name)) not in structure.modules]
    ends = {
        known.removesuffix(f".{path}") for path in paths for known in structure.modules if known.endswith(f".{path}")
    }
    found = {end: sum(f"{end}.{path}" in structure.modules for path in paths) for end in sorted(ends)}
    most = max(found, key=lambda end: found[end], default="")
    is_one = most and list(found.values()).count(found[most]) == 1
    return (most, found[most]) if is_one else ("", 0)


def _told_of_inside(structure: Structure, names: list[str]) -> str:
    """Say that a policy was found on the network inside, where that is what names that are missing show."""
    prefix, num_found = _network_inside(structure, names)
    if 2 * num_found < len(names) or not prefix:
        return ""
    return (
        f"; {num_found} of {len(names)} missing names are below {prefix!r}: the policy was found on the network inside,"
        f" so apply it to that (in Lightning's plugin and Fabric's, module={prefix!r})"
    )


def _matches(glob: str, names: Iterable[str]) -> bool:
    pattern = re.compile(translate(glob))
    return any(pattern.match(name) for name in names if name)


def _check_rules(structure: Structure, policy: Policy, *, strict: bool) -> None:
    for rule in policy.modules:
        if rule in structure.governors:
            governor = structure.governors[rule]
            raise ApplyError(
                f"module {rule!r} is computed by {governor!r} ({_type_name(structure.modules[governor])}) as a whole "
                f"and has no precision of its own; name {governor!r} instead"
            )
    unmatched = [
        rule
        for rule in policy.modules
        if rule not in structure.modules and not (is_glob(rule) and _matches(rule, structure.modules))
    ]
    if not unmatched:
        return
    shown = ", ".join(f"{rule!r}{did_you_mean(rule, structure.modules, count=1)}" for rule in unmatched[:8])
    more = f" and {len(unmatched) - 8} more" if len(unmatched) > 8 else ""
    message = f"{len(unmatched)} of the policy's rules match no module of this model: {shown}{more}"
    message += _told_of_inside(structure, unmatched)
    if strict:
        raise ApplyError(message)
    warnings.warn(message, PrecisionWarning, stacklevel=4)


def _check_model(structure: Structure, model: ModelInfo, *, strict: bool) -> None:
    problems: list[str] = []
    shapes: list[str] = []
    for name, info in model.modules.items():
        path = name if name in structure.modules else without_prefixes(name)
        module = structure.modules.get(path)
        if module is None:
            problems.append(f"{name!r} ({info.type}) is missing{did_you_mean(name, structure.modules, count=1)}")
        elif info.type not in _type_names(module):
            problems.append(f"{name!r} is {_type_name(module)}, the policy was made for {info.type}")
        elif (found := _shapes(module)) != info.parameters and not any(is_lazy(p) for p in module.parameters()):
            shapes.append(f"{name} {found} instead of {dict(info.parameters)}")
    known = {without_prefixes(name) for name in model.modules} | set(model.modules)
    problems += [
        f"{name!r} ({_type_name(module)}) is not covered by the policy"
        for name, module in structure.modules.items()
        if model.modules and name and module._parameters and not module._modules
        and name not in known and name not in structure.governors
    ]  # fmt: skip
    if problems:
        message = f"the policy was made for another model ({model.name}): " + "; ".join(problems[:8])
        message += f"; and {len(problems) - 8} more" if len(problems) > 8 else ""
        missing = [name for name in model.modules if without_prefixes(name) not in structure.modules]
        message += _told_of_inside(structure, missing)
        if strict:
            raise ApplyError(message)
        warnings.warn(message, PrecisionWarning, stacklevel=4)
    if shapes:
        message = f"parameters have other shapes than the policy was made for: {'; '.join(shapes[:8])}"
        warnings.warn(message, PrecisionWarning, stacklevel=4)


def _of_aliases(names: list[str], by_name: dict[str, Precision], rules: dict[str, str | None]) -> Precision:
    named = [name for name in names if rules[name] == name] or names
    first = named[0]
    for other in named[1:]:
        if by_name[other] != by_name[first]:
            raise ApplyError(
                f"{first!r} ({by_name[first]}) and {other!r} ({by_name[other]}) are one module and take one precision"
            )
    return by_name[first]


def _check_tied(plan: Plan) -> None:
    """Refuse two precisions of one weight, but for a module that holds the weight of a part of its own once more."""
    owners: dict[int, list[tuple[str, str]]] = {}
    for name, module in plan.structure.unique():
        for key, parameter in module._parameters.items():
            if parameter is None or is_lazy(parameter):
                continue
            path = f"{name}.{key}" if name else key
            known = owners.setdefault(id(parameter), [])
            for first, first_path in known:
                is_part = lies_in(name, first) or lies_in(first, name)
                if plan.precision(first) != plan.precision(name) and not is_part:
                    raise ApplyError(
                        f"{first_path!r} ({plan.precision(first)}) and {path!r} ({plan.precision(name)}) are one tied "
                        "weight and take one precision; give both modules the same"
                    )
            known.append((name, path))


def _check_scripted(plan: Plan) -> None:
    for name, module in plan.structure.unique():
        if not is_scripted(module) or name in plan.structure.governors:
            continue
        parent = plan.structure.calling_parent(name)
        precision = plan.precision(name)
        if precision in ("fp16", "bf16"):
            raise ApplyError(
                f"module {name!r} is TorchScript, whose weights cannot be cast from outside: found {precision}; "
                "allowed: fp32, autocast"
            )
        if parent is None or plan.precision(parent) != precision:
            above = "it is the root" if parent is None else f"{parent!r} has {plan.precision(parent)}"
            raise ApplyError(
                f"module {name!r} is TorchScript and computes in its parent's region: found {precision}, but {above}; "
                "give both the same"
            )


def _check_async(plan: Plan) -> None:
    for name, module in plan.structure.unique():
        forward = inspect.getattr_static(type(module), "forward", None)
        runs_later = inspect.iscoroutinefunction(forward) or inspect.isasyncgenfunction(forward)
        if runs_later and plan.precision(name) != "fp32":
            raise ApplyError(
                f"module {name!r} has an `async` forward, which runs after the call, outside of any region: "
                f"found {plan.precision(name)}; allowed: fp32"
            )


def _type_name(module: nn.Module) -> str:
    return _type_names(module)[0]


def _type_names(module: nn.Module) -> list[str]:
    """The class's name, seen through what parametrize, FSDP2 and lazy modules make of it."""
    names = [cls.__name__ for cls in type(module).__mro__ if issubclass(cls, nn.Module) and cls is not nn.Module]
    first = names[0] if names else "Module"
    if first.startswith(("Parametrized", "FSDP")) and len(names) > 1:
        names = [name for name in names[1:] if name != "FSDPModule"]
    lazy = getattr(type(module), "cls_to_become", None)
    return [lazy.__name__, *names] if lazy is not None else names or ["Module"]


def _shapes(module: nn.Module) -> dict[str, list[int]]:
    return {key: list(p.shape) for key, p in module._parameters.items() if p is not None and not is_lazy(p)}
