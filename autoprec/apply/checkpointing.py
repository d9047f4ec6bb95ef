"""Activation checkpointing by module: what a forward saves is thrown away and computed again in the backward pass.

Installed as the module's `forward`, like a policy, and always outside of it, whichever came first: the recomputation
then runs in the policy's precisions.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fnmatch import translate
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from autoprec.apply.structure import (
    Structure,
    class_forward,
    has_forward,
    has_static_forward,
    is_scripted,
    read_structure,
    without_prefixes,
)
from autoprec.errors import ApplyError, did_you_mean
from autoprec.policy import is_glob

__all__ = [
    "checkpoint_modules",
    "checkpointed_modules",
    "matched_modules",
    "own_forward",
    "remove_checkpointing",
    "set_own_forward",
]


@dataclass(eq=False)
class _Inside:
    """The instance forward that is checkpointed (a policy's, the user's own); None for the class's."""

    forward: Callable[..., Any] | None
    is_static: bool


class CheckpointForward(functools.partial[Any]):
    """The forward of a checkpointed module; shows the signature of the forward that it stands for."""

    @property
    def __signature__(self) -> inspect.Signature:
        module, inside = self.args
        return inspect.signature(_forward(module, inside))


def checkpoint_modules(model: nn.Module, names: Iterable[str]) -> list[str]:
    """Checkpoint modules of the model, in place; return which. Those that are checkpointed already stay so.

    Works before and after `apply_policy`. Non-reentrant; the random state of the forward is that of the recomputation.
    Without gradients, the forward runs as it is.

    Args:
        names: module names, or globs whose `*` crosses dots; of matches inside one another the outermost counts.

    Raises:
        ApplyError: a name matches nothing, or something that cannot be called; the model is unchanged.
    """
    structure = read_structure(model)
    found = matched_modules(structure, names)
    for name in found:
        module = structure.modules[name]
        if not isinstance(module.__dict__.get("forward"), CheckpointForward):
            inside = _Inside(module.__dict__.get("forward"), has_static_forward(module))
            module.__dict__["forward"] = CheckpointForward(_run_checkpointed, module, inside)
    return found


def remove_checkpointing(model: nn.Module) -> None:
    """Undo `checkpoint_modules` everywhere in the model."""
    for module in model.modules():
        forward = module.__dict__.get("forward")
        if isinstance(forward, CheckpointForward):
            del module.__dict__["forward"]
            set_own_forward(module, forward.args[1].forward)


def checkpointed_modules(structure: Structure) -> list[str]:
    """Return the names of the modules that `checkpoint_modules` checkpointed."""
    return [
        name for name, module in structure.unique() if isinstance(module.__dict__.get("forward"), CheckpointForward)
    ]


def matched_modules(structure: Structure, names: Iterable[str]) -> list[str]:
    """Return the modules that names and globs mean, each once, outermost matches alone.

    Raises:
        ApplyError: as `checkpoint_modules`.
    """
    matched: dict[str, None] = {}
    for rule in names:
        found = _matches(structure, rule)
        if not found:
            nearest = did_you_mean(rule, [name for name in structure.modules if name])
            raise ApplyError(f"checkpoint {rule!r} matches no module of this model{nearest}")
        matched |= dict.fromkeys(found)
    outermost = [name for name in matched if not any(above in matched for above in _above(structure, name))]
    for name in outermost:
        module = structure.modules[name]
        if name in structure.governors or not has_forward(module):
            raise ApplyError(
                f"checkpoint {name!r} ({type(module).__name__}) is never called itself; "
                + (
                    f"name {structure.governors[name]!r}"
                    if name in structure.governors
                    else f"'{name}.*' means its parts"
                )
            )
        if is_scripted(module):
            raise ApplyError(
                f"checkpoint {name!r} is TorchScript, which runs no Python forward; name a module above it"
            )
    return outermost


def own_forward(module: nn.Module) -> Callable[..., Any] | None:
    """Return the instance forward that the module has apart from checkpointing, None for the class's."""
    forward = module.__dict__.get("forward")
    if isinstance(forward, CheckpointForward):
        inside: _Inside = forward.args[1]
        return inside.forward
    return forward


def set_own_forward(module: nn.Module, forward: Callable[..., Any] | None) -> None:
    """Give the module an instance forward inside of its checkpointing; None leaves it the class's."""
    outer = module.__dict__.get("forward")
    if isinstance(outer, CheckpointForward):
        outer.args[1].forward = forward
    elif forward is not None:
        module.__dict__["forward"] = forward
    else:
        module.__dict__.pop("forward", None)


def _matches(structure: Structure, rule: str) -> list[str]:
    if rule in structure.modules or not is_glob(rule):
        known = rule if rule in structure.modules else without_prefixes(rule)
        return structure.names[id(structure.modules[known])][:1] if known in structure.modules else []
    pattern = re.compile(translate(rule))
    return [name for name, module in structure.unique() if name and pattern.match(name)]


def _above(structure: Structure, name: str) -> list[str]:
    found = []
    parent = structure.parents[name]
    while parent is not None:
        found.append(parent)
        parent = structure.parents[parent]
    return found


def _run_checkpointed(module: nn.Module, inside: _Inside, /, *args: Any, **kwargs: Any) -> Any:
    forward = _forward(module, inside)
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)


def _forward(module: nn.Module, inside: _Inside) -> Callable[..., Any]:
    return inside.forward or class_forward(module, is_static=inside.is_static)
