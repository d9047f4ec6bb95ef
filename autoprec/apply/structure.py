"""The modules of a model as a policy sees them: names without wrappers, aliases, parents, and what governs what."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from autoprec.errors import ApplyError

__all__ = [
    "WRAPPER_PREFIXES",
    "Structure",
    "read_structure",
    "unwrap",
    "without_prefixes",
    "class_forward",
    "has_forward",
    "has_static_forward",
    "is_scripted",
]

WRAPPER_PREFIXES = ("module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
"""Name parts that DDP and DataParallel, torch.compile, checkpoint wrappers and FSDP put before a module's own name."""


@dataclass(slots=True)
class Structure:
    """The names of a model.

    Attributes:
        modules: name -> module, the root as "", parents first; wrappers are seen through.
        parents: name -> name of the module it lives in, None for the root.
        names: id of a module -> all its names (aliases), the first one first.
        governors: name -> the single unit (attention, recurrent layer, TorchScript, parametrized) that computes for it.
    """

    modules: dict[str, nn.Module] = field(default_factory=dict)
    parents: dict[str, str | None] = field(default_factory=dict)
    names: dict[int, list[str]] = field(default_factory=dict)
    governors: dict[str, str] = field(default_factory=dict)

    def unique(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield each module once, under its first name."""
        for name, module in self.modules.items():
            if self.names[id(module)][0] == name:
                yield name, module

    def calling_parent(self, name: str) -> str | None:
        """Return the nearest module above that has a forward of its own (an nn.ModuleList has none)."""
        parent = self.parents[name]
        while parent is not None and not has_forward(self.modules[parent]):
            parent = self.parents[parent]
        return parent


def read_structure(model: nn.Module) -> Structure:
    """Read the names of a model; the model may be wrapped (DDP, compiled, checkpointed parts)."""
    structure = Structure()
    _walk(structure, unwrap(model), "", None, None, ())
    return structure


def unwrap(module: nn.Module) -> nn.Module:
    """Return the module inside any wrappers."""
    while (inner := _wrapped_by(module)) is not None:
        module = inner
    return module


def without_prefixes(rule: str) -> str:
    """Return a rule without wrapper prefixes anywhere in its path."""
    return ".".join(part for part in rule.split(".") if part not in WRAPPER_PREFIXES)


def has_forward(module: nn.Module) -> bool:
    """Whether the module can be called: ModuleList, ModuleDict and ParameterList have no forward."""
    if is_scripted(module):
        return True
    forward = type(module).forward
    return "forward" in module.__dict__ or getattr(forward, "__name__", "") != "_forward_unimplemented"


def has_static_forward(module: nn.Module) -> bool:
    """Whether the forward is a static or class method, which the class gives as it is called: without the module."""
    return isinstance(inspect.getattr_static(type(module), "forward", None), (staticmethod, classmethod))


def class_forward(module: nn.Module, *, is_static: bool) -> Callable[..., Any]:
    """Return the forward that the module has from its class; `is_static` as `has_static_forward` says."""
    forward: Callable[..., Any] = type(module).forward
    return forward if is_static else forward.__get__(module)


def is_scripted(module: nn.Module) -> bool:
    return isinstance(module, torch.jit.ScriptModule)


def _walk(
    structure: Structure,
    module: nn.Module,
    name: str,
    parent: str | None,
    governor: str | None,
    above: tuple[nn.Module, ...],
) -> None:
    if any(module is ancestor for ancestor in above):
        raise ApplyError(f"module {name!r} contains itself; a policy needs a tree of modules")
    structure.modules[name] = module
    structure.parents[name] = parent
    structure.names.setdefault(id(module), []).append(name)
    if governor is not None:
        structure.governors[name] = governor
    for child_name, child in module._modules.items():
        if child is not None:
            below = governor if governor is not None else (name if _governs(module, child_name) else None)
            child_path = f"{name}.{child_name}" if name else child_name
            _walk(structure, unwrap(child), child_path, name, below, (*above, module))


def _governs(module: nn.Module, child_name: str) -> bool:
    if isinstance(module, (nn.MultiheadAttention, nn.RNNBase)) or is_scripted(module):
        return True
    return child_name == "parametrizations" and isinstance(module._modules[child_name], nn.ModuleDict)


def _wrapped_by(module: nn.Module) -> nn.Module | None:
    if len(module._modules) != 1:
        return None
    if isinstance(module, (DistributedDataParallel, DataParallel)):
        return module._modules["module"]
    for prefix in WRAPPER_PREFIXES[1:]:
        if prefix in module._modules:  # TorchScript's own mapping has no `get`
            return module._modules[prefix]
    return None
