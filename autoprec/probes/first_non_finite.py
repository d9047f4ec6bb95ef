"""Find the unit in which values stop being finite, forward or backward, while a training runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from autoprec.apply import read_structure

__all__ = ["BadUnit", "NonFiniteWatch"]


@dataclass(frozen=True, slots=True)
class BadUnit:
    """Where a value that is not finite first came up.

    Attributes:
        name: the module's name, "" for the model itself; of a module with parts, its own code between them.
        phase: `input` where the model was handed such a value.
        what: what was seen, in words.
        near: the modules next to it, nearest first: what overflows may be the cast to or from one of them.
    """

    name: str
    phase: Literal["input", "forward", "backward"]
    what: str
    near: tuple[str, ...] = ()


class NonFiniteWatch:
    """Hooks that look at what every unit takes and gives; on a GPU each look waits for the device.

    A forward value counts where it is NaN or infinite, but not the -inf of a mask: what is -inf alone and has no
    gradient. `start` and `stop` may be called at any time between steps; hooks are seen by models that run eagerly.

    Args:
        model: may be wrapped (DDP, torch.compile, fully_shard); names are those that a policy uses.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._handles: list[RemovableHandle] = []
        self._running: list[_Running] = []
        self.found: BadUnit | None = None

    @property
    def is_watching(self) -> bool:
        return bool(self._handles)

    def start(self) -> None:
        """Put the hooks on the modules as they are now; nothing where they are on."""
        if self._handles:
            return
        structure = read_structure(self._model)
        for name, module in structure.unique():
            if name in structure.governors or isinstance(module, torch.jit.ScriptModule):
                continue
            before, after = partial(self._before, name), partial(self._after, name)
            self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
            self._handles.append(module.register_forward_hook(after, with_kwargs=True, always_call=True))
        for name, module in structure.unique():
            unit = structure.governors.get(name, name)
            for parameter in module._parameters.values():
                if parameter is not None and parameter.requires_grad:
                    hook = partial(self._of_parameter, unit)
                    self._handles.append(parameter.register_hook(hook))  # type: ignore[no-untyped-call]

    def stop(self) -> None:
        """Take the hooks off and forget what was found."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.clear()

    def clear(self) -> None:
        """Forget what was found: the next step starts."""
        self.found = None
        self._running.clear()

    def _before(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        taken = _floating((args, kwargs))
        if self.found is None and any(map(_is_bad, taken)):
            self.found = self._handed_over(name)
        self._running.append(_Running(name, only_calls=type(module).forward is nn.Sequential.forward))
        for tensor in taken:
            if (watched := self._watched(tensor)) is not None:
                watched.takers.append(name)

    def _handed_over(self, name: str) -> BadUnit:
        if not self._running:
            return BadUnit(name, "input", "it was handed to the model")
        caller = self._running[-1]
        if caller.only_calls:  # between its parts nothing happens but a cast
            return BadUnit(name, "forward", "its input, cast", (caller.last,))
        return BadUnit(caller.name, "forward", f"its own code, before {name}", (caller.last, name))

    def _after(self, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if self._running:
            own = self._running.pop()
            given = _floating(output)
            if self.found is None and any(map(_is_bad, given)):
                self.found = BadUnit(name, "forward", "its output", (own.last,))
            caller = self._running[-1] if self._running else _Running("")
            caller.last = name
            for tensor in given:
                if (watched := self._watched(tensor)) is not None:
                    watched.givers.append(name)
                    watched.caller = caller.name

    def _watched(self, tensor: torch.Tensor) -> _Watched | None:
        """Return what is known of a tensor of the forward pass; its gradient is looked at when that comes.

        Kept as the tensor's attribute, which keeps no activation alive.
        """
        if not tensor.requires_grad or tensor.is_leaf:
            return None
        watched: _Watched | None = getattr(tensor, "_autoprec_non_finite_watch", None)
        if watched is None:
            watched = tensor._autoprec_non_finite_watch = _Watched()  # type: ignore[attr-defined]
            tensor.register_hook(partial(self._of_activation, watched))  # type: ignore[no-untyped-call]
        return watched

    def _of_activation(self, watched: _Watched, gradient: torch.Tensor) -> None:
        if not self._handles or self.found is not None or _is_finite(gradient):
            return
        if watched.takers:
            self.found = BadUnit(watched.takers[-1], "backward", "the gradient of its input", tuple(watched.givers))
        else:
            what = "the gradient that its own code, or the loss, gave"
            self.found = BadUnit(watched.caller, "backward", what, tuple(watched.givers))

    def _of_parameter(self, name: str, gradient: torch.Tensor) -> None:
        if self.found is None and not _is_finite(gradient):
            self.found = BadUnit(name, "backward", "the gradient of its parameter")


@dataclass(eq=False)
class _Running:
    """A module whose forward runs: whether it is a mere sequence, and which of its parts ended last."""

    name: str
    only_calls: bool = False
    last: str = ""


@dataclass(eq=False)
class _Watched:
    """A tensor of the forward pass: the modules that took it and gave it, and the one that called the last giver."""

    takers: list[str] = field(default_factory=list)
    givers: list[str] = field(default_factory=list)
    caller: str = ""


def _floating(value: Any) -> list[torch.Tensor]:
    leaves = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    return [leaf for leaf in leaves if leaf.is_floating_point() and leaf.numel()]


def _is_finite(tensor: torch.Tensor) -> bool:
    return bool(torch.isfinite(_local(tensor)).all())


def _is_bad(tensor: torch.Tensor) -> bool:
    if _is_finite(tensor):
        return False
    values = _local(tensor)
    return tensor.requires_grad or bool((values.isnan() | values.isposinf()).any())


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """This process's part of a distributed tensor."""
    values: torch.Tensor = tensor.detach()
    return values.to_local() if hasattr(values, "to_local") else values
