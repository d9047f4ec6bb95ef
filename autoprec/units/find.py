"""A model's units: which modules a real batch calls, how often, in which order, and what they can compute in."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parameter import is_lazy

from autoprec.apply.structure import Structure, has_forward, is_scripted, read_structure
from autoprec.apply.writes import written_parameters
from autoprec.errors import ApplyError
from autoprec.policy import PRECISIONS, Policy, Precision, lies_in

__all__ = ["Unit", "Units", "find_units", "Call", "tied_units", "undisturbed"]


@dataclass(frozen=True, slots=True)
class Unit:
    """A module that receives one precision.

    Attributes:
        name: its first name; `aliases` are the others of the same object.
        type: its class name.
        order: place of its first call among all units, from 0.
        num_calls: calls in one forward of the root.
        num_parameters: parameter elements in its subtree.
        choices: the precisions it can compute in.
        reasons: why the other precisions are not among the choices.
        tied: what shares a weight with it and takes the same precision: other units, and layers that hold it and
            are never called.
    """

    name: str
    type: str
    aliases: tuple[str, ...] = ()
    order: int = 0
    num_calls: int = 1
    num_parameters: int = 0
    choices: tuple[Precision, ...] = PRECISIONS
    reasons: Mapping[Precision, str] = field(default_factory=dict)
    tied: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Units:
    """The units of a model in the order of their first call.

    Attributes:
        units: the leaves and the modules that cannot be split.
        governed: modules without a precision of their own -> the module that computes for them.
        calls: names of the units in call order, one entry a call.
        composites: modules above the units -> why their own code cannot run in some precision.
    """

    units: tuple[Unit, ...]
    governed: Mapping[str, str]
    calls: tuple[str, ...]
    composites: Mapping[str, Mapping[Precision, str]] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Unit]:
        return iter(self.units)

    def __len__(self) -> int:
        return len(self.units)

    def check(self, policy: Policy) -> None:
        """Refuse rules that could have no effect or cannot run.

        Raises:
            ApplyError: a rule names a module that is never called, or a precision that a unit cannot compute in.
        """
        for rule, precision in policy.modules.items():
            if rule in self.governed:
                raise ApplyError(
                    f"module {rule!r} is never called: {self.governed[rule]!r} computes for it, so a precision of its "
                    f"own has no effect; name {self.governed[rule]!r} instead"
                )
            unit = next((unit for unit in self.units if rule == unit.name or rule in unit.aliases), None)
            if unit is not None and precision not in unit.choices:
                raise ApplyError(
                    f"module {rule!r} cannot compute in {precision}: {unit.reasons[precision]}; "
                    f"allowed: {', '.join(unit.choices)}"
                )


@dataclass(slots=True)
class Call:
    """The first call of a unit, kept to try it again in other precisions."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def find_units(model: nn.Module, run: Callable[[nn.Module], Any], *, try_precisions: bool = True) -> Units:
    """Run the model once and return its units.

    Leaves the model, its BatchNorm statistics, gradients and the random state as they were; lazy modules get their
    shapes.

    Args:
        model: the model, in the mode that it trains in; without a policy.
        run: `run(model)` does one forward on a real batch, as the training does; what it returns is not looked at.
        try_precisions: try each unit, forward and backward, in each precision, and units of different precisions
            side by side, to take away what cannot run.

    Raises:
        Whatever `run` raises: a model that fails in FP32 has no units.
    """
    from autoprec.units.mixtures import refused_in_mixtures
    from autoprec.units.trial_runs import refused_by_composites, refused_by_units

    structure = read_structure(model)
    with undisturbed(structure.modules[""]):
        calls, first = _record_calls(structure, model, run)
        counted = {name: calls.count(name) for name in dict.fromkeys(calls)}
        unit_names = [name for name in counted if _is_unit(structure, name, set(counted))]
        refused: dict[str, dict[Precision, str]] = {name: {} for name in unit_names}
        composites: dict[str, dict[Precision, str]] = {}
        if try_precisions:
            refused |= refused_by_units({name: first[name] for name in unit_names})
            composites = refused_by_composites(structure, model, run, refused)
            refused = refused_in_mixtures(structure, model, run, calls=first, refused=refused, composites=composites)
            unit_names = [name for name in counted if name in refused]
            composites = {n: r for n, r in composites.items() if not any(lies_in(n, unit) for unit in unit_names)}
    tied = tied_units(structure, unit_names)
    for group in {tuple(name for name in names if name in refused) for names in tied.values() if names}:
        for precision, reason in {p: r for name in group for p, r in refused[name].items()}.items():
            for name in group:
                refused[name].setdefault(precision, f"shares a weight with a unit that cannot: {reason}")
    units = tuple(
        Unit(
            name=name,
            type=type(structure.modules[name]).__name__,
            aliases=tuple(structure.names[id(structure.modules[name])][1:]),
            order=order,
            num_calls=counted[name],
            num_parameters=sum(p.numel() for p in structure.modules[name].parameters() if not is_lazy(p)),
            choices=tuple(p for p in PRECISIONS if p not in refused[name]),
            reasons=refused[name],
            tied=tuple(other for other in tied[name] if other != name),
        )
        for order, name in enumerate(unit_names)
    )
    unit_calls = tuple(name for name in calls if name in refused)
    return Units(units, _governed(structure, set(counted)), unit_calls, composites)


def _record_calls(
    structure: Structure, model: nn.Module, run: Callable[[nn.Module], Any]
) -> tuple[list[str], dict[str, Call]]:
    names = {id(module): structure.names[id(module)][0] for module in structure.modules.values()}
    calls: list[str] = []
    first: dict[str, Call] = {}

    def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        name = names.get(id(module))
        if name is not None:
            calls.append(name)
            first.setdefault(name, Call(module, args, kwargs))

    hooked = dict.fromkeys(module for name, module in structure.modules.items() if name not in structure.governors)
    handles = [
        module.register_forward_pre_hook(record, prepend=True, with_kwargs=True)
        for module in hooked
        if not is_scripted(module)
    ]
    if any(is_scripted(module) for module in hooked):  # these take no hooks of their own
        handles.append(
            register_module_forward_pre_hook(lambda m, args: record(m, args, {}) if is_scripted(m) else None)
        )
    try:
        run(model)
    finally:
        for handle in handles:
            handle.remove()
    if not calls:
        raise ApplyError("the run never called the model, so it has no units; `run(model)` has to call `model(...)`")
    return calls, first


def _is_unit(structure: Structure, name: str, called: set[str]) -> bool:
    """A unit is a called module that nothing governs and below which nothing else is called."""
    if name in structure.governors:
        return False
    module = structure.modules[name]
    below = [structure.names[id(m)][0] for m in module.modules() if id(m) in structure.names and m is not module]
    inside = [other for other in below if other in called and other not in structure.governors]
    return not inside


def _governed(structure: Structure, called: set[str]) -> dict[str, str]:
    governed = dict(structure.governors)
    for name, module in structure.modules.items():
        first = structure.names[id(module)][0]
        if not name or first in called or name in governed or not has_forward(module):
            continue
        parent = structure.parents[name]
        while parent is not None and structure.names[id(structure.modules[parent])][0] not in called:
            parent = structure.parents[parent]
        governed[name] = parent or ""
    return governed


def tied_units(structure: Structure, unit_names: list[str]) -> dict[str, tuple[str, ...]]:
    """Return for each unit what shares a parameter with it: units, and layers that hold it and are never called."""
    idle = [
        name
        for name, module in structure.unique()
        if not module._modules and not any(lies_in(name, unit) for unit in unit_names)
    ]
    owners: dict[int, list[str]] = {}
    for name in [*unit_names, *idle]:
        for parameter in structure.modules[name].parameters():
            owners.setdefault(id(parameter), []).append(name)
    tied: dict[str, tuple[str, ...]] = dict.fromkeys(unit_names, ())
    for names in owners.values():
        for name in names if len(names) > 1 else ():
            if name in tied:
                tied[name] = tuple(dict.fromkeys([*tied[name], *names]))
    return tied


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Give back buffers, parameters that a forward writes to, gradients and the random state after the block.

    The random state is that of torch, numpy and Python.
    """
    written = [
        (parameter, parameter.detach().clone())
        for module in model.modules()
        for parameter in (module.get_parameter(name) for name in written_parameters(module))
        if not is_lazy(parameter)
    ]
    buffers = {key: (b, b.detach().clone()) for key, b in model.named_buffers() if not is_lazy(b)}
    lazy = [module for module in model.modules() if any(is_lazy(b) for b in module._buffers.values() if b is not None)]
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    for parameter, _ in gradients:
        parameter.grad = None
    state, numpy_state = random.getstate(), np.random.get_state()
    accelerator = torch.accelerator.current_accelerator()
    kind = accelerator.type if accelerator is not None else "cuda"
    devices = list(range(torch.accelerator.device_count())) if accelerator is not None else []
    try:
        with torch.random.fork_rng(devices=devices, device_type=kind):
            yield
    finally:
        random.setstate(state)
        np.random.set_state(numpy_state)
        with torch.no_grad():
            for parameter, before in written:
                parameter.data.copy_(before)
            for key, (buffer, before) in buffers.items():
                buffer.copy_(before)
                _put_back(model, key, buffer)
        for module in lazy:
            reset = getattr(module, "reset_running_stats", None)
            if callable(reset):
                reset()
        for parameter, gradient in gradients:
            parameter.grad = gradient


def _put_back(model: nn.Module, key: str, buffer: torch.Tensor) -> None:
    path, _, name = key.rpartition(".")
    owner = model.get_submodule(path)
    if owner._buffers.get(name) is not buffer:
        owner._buffers[name] = buffer
