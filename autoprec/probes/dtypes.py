"""Record in which dtypes the parts of a model really compute: what they take, return, and run inside."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from autoprec.apply import read_structure
from autoprec.policy import lies_in

__all__ = ["DtypeLog", "Operator", "UnitDtypes", "watch_dtypes"]

CASTS = frozenset({"_to_copy", "copy_", "detach", "clone", "empty_like", "view", "t", "alias", "expand"})
"""Operators that move or look at values and compute nothing."""


@dataclass(frozen=True, slots=True)
class Operator:
    """One operator that ran: its aten name and the dtypes of its floating inputs and outputs."""

    name: str
    inputs: frozenset[torch.dtype]
    outputs: frozenset[torch.dtype]


@dataclass(slots=True)
class UnitDtypes:
    """What one module took, returned and ran in its own code (its children's operators are under their names)."""

    inputs: set[torch.dtype] = field(default_factory=set)
    outputs: set[torch.dtype] = field(default_factory=set)
    operators: list[Operator] = field(default_factory=list)
    num_calls: int = 0

    @property
    def computed(self) -> frozenset[torch.dtype]:
        """The dtypes that its operators computed on; casts, copies and views do not count."""
        used = [operator.inputs | operator.outputs for operator in self.operators if operator.name not in CASTS]
        return frozenset().union(*used)


@dataclass(slots=True)
class DtypeLog:
    """What was seen, by module name (wrappers are seen through, "" is the model); backward operators are left out."""

    units: dict[str, UnitDtypes] = field(default_factory=dict)

    def __getitem__(self, name: str) -> UnitDtypes:
        return self.units[name]

    def below(self, name: str) -> frozenset[torch.dtype]:
        """The dtypes computed in a module and everything below it."""
        inside = [unit.computed for path, unit in self.units.items() if lies_in(path, name)]
        return frozenset().union(*inside)


@contextmanager
def watch_dtypes(model: nn.Module) -> Iterator[DtypeLog]:
    """Record dtypes while the model runs inside the block; leaves no trace on the model.

    Enter it inside `emulate()`, not around it. A module called as `layer.forward(x)` counts as a part of its caller.
    """
    structure = read_structure(model)
    names = {identity: aliases[0] for identity, aliases in structure.names.items()}
    log = DtypeLog({name: UnitDtypes() for name in names.values()})
    running: list[str] = []

    def before(module: nn.Module, args: Any) -> None:
        name = names.get(id(module))
        if name is not None:
            running.append(name)
            log.units[name].num_calls += 1
            log.units[name].inputs |= _dtypes(args)

    def after(module: nn.Module, args: Any, output: Any) -> None:
        name = names.get(id(module))
        if name is not None:
            running.pop()
            log.units[name].outputs |= _dtypes(output)

    with ExitStack() as stack:
        stack.enter_context(_Operators(log, running))
        stack.callback(register_module_forward_pre_hook(before).remove)
        stack.callback(register_module_forward_hook(after, always_call=True).remove)
        yield log


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, log: DtypeLog, running: list[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.log = log
        self.running = running

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.running and torch._C._current_graph_task_id() == -1:
            name = func._schema.name.removeprefix("aten::")
            operator = Operator(name, _dtypes((args, kwargs)), _dtypes(result))
            self.log.units[self.running[-1]].operators.append(operator)
        return result


def _dtypes(value: Any) -> frozenset[torch.dtype]:
    leaves = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    return frozenset(leaf.dtype for leaf in leaves if leaf.is_floating_point())
