"""The ranges at trained weights: one watched FP32 step after the last, beside those that a profile takes at the start.

Gradients shrink and activations grow as a network learns, so that a loss scale that is safe at the start weights may
not be safe later, and the other way round.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from autoprec.apply.trees import first_tensor
from autoprec.probes.ranges import ExponentHistogram
from autoprec.tasks.protocol import Batch, Task
from autoprec.trials.outcome import EndRanges

__all__ = ["watch_end"]


def watch_end(model: nn.Module, task: Task, batch: Batch) -> EndRanges:
    """Return the ranges of one forward and backward pass at the model's present weights; takes no step.

    Activations are the outputs of modules without children; gradients those of these outputs and of all parameters.
    The parameters' own gradients are cleared.
    """
    gradients = ExponentHistogram()
    largest: tuple[float, str] = (0.0, "")

    def note_gradient(gradient: torch.Tensor) -> None:
        nonlocal gradients
        gradients = gradients + ExponentHistogram.of(gradient)

    def note_output(name: str, output: Any) -> None:
        nonlocal largest
        tensor = first_tensor(output)
        if tensor is None or not tensor.is_floating_point():
            return
        maximum = ExponentHistogram.of(tensor).maximum
        if maximum > largest[0]:  # where a value came up, not where it was handed on
            largest = (maximum, name)
        if tensor.requires_grad:
            tensor.register_hook(note_gradient)  # type: ignore[no-untyped-call]

    handles = [
        module.register_forward_hook(lambda _, __, output, name=name: note_output(name, output))
        for name, module in model.named_modules()
        if not list(module.children()) and not isinstance(module, torch.jit.ScriptModule)
    ]
    try:
        model.zero_grad()
        for _, compute_loss in task.trained_losses:
            compute_loss(model, batch).backward()  # type: ignore[no-untyped-call]
    finally:
        for handle in handles:
            handle.remove()
    for parameter in model.parameters():
        if parameter.grad is not None and not parameter.grad.is_sparse:
            note_gradient(parameter.grad)
    model.zero_grad()
    return EndRanges(gradients=gradients, largest_activation=largest[0], module=largest[1])
