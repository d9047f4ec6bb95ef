"""Where a value first stopped being finite: a second look, taken only when there is trouble."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from autoprec.tasks.batches import map_tensors
from autoprec.trials.outcome import NonFinite

__all__ = ["all_finite", "find_in_forward", "find_in_gradients", "find_in_buffers"]


def all_finite(value: Any) -> bool:
    """Tell whether every floating tensor in a nested value is finite throughout."""
    results: list[bool] = []

    def look(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_floating_point() and len(results) == 0:
            with torch.no_grad():
                if not bool(torch.isfinite(tensor).all()):
                    results.append(False)
        return tensor

    map_tensors(look, value)
    return not results


def find_in_forward(model: nn.Module, run: Callable[[], Any], *, step: int) -> NonFinite | None:
    """Run a forward again with a hook on each module; return the first that gives a non-finite output.

    Buffers (running statistics) are put back afterwards; the caller sets the random state.
    """
    names = {module: name for name, module in model.named_modules()}
    found: list[NonFinite] = []

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if not found and not all_finite(output):
            before = "finite input" if all_finite((args, kwargs)) else "non-finite input"
            found.append(NonFinite(step=step, module=names[module], what=f"forward output, from {before}"))

    handles = [module.register_forward_hook(hook, with_kwargs=True) for module in names]
    kept = {name: buffer.clone() for name, buffer in model.named_buffers()}
    try:
        with torch.no_grad():
            run()
    finally:
        for handle in handles:
            handle.remove()
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                buffer.copy_(kept[name])
    return found[0] if found else None


def find_in_gradients(model: nn.Module, *, step: int) -> NonFinite | None:
    """Return the parameter nearest to the loss whose gradient is not finite: backward meets it first."""
    for name, parameter in reversed(list(model.named_parameters())):
        if parameter.grad is not None and not all_finite(parameter.grad):
            return NonFinite(step=step, module=name.rpartition(".")[0], what=f"gradient of {name}")
    return None


def find_in_buffers(model: nn.Module, *, step: int) -> NonFinite | None:
    """Return the first buffer that is not finite."""
    for name, buffer in model.named_buffers():
        if not all_finite(buffer):
            return NonFinite(step=step, module=name.rpartition(".")[0], what=f"buffer {name}")
    return None
