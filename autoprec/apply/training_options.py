"""What a training has beside its precision: checkpointing, memory format, TF32, torch.compile. Set, and compared."""

from __future__ import annotations

import warnings
from typing import Any, TypeVar

import torch
from torch import nn

from autoprec.apply.checkpointing import checkpoint_modules, checkpointed_modules, matched_modules
from autoprec.apply.structure import Structure, read_structure, unwrap
from autoprec.errors import ApplyError, PrecisionWarning
from autoprec.policy import Policy

__all__ = ["apply_training_options", "set_tf32", "uses_tf32", "warn_of_missing_options"]

ModuleT = TypeVar("ModuleT", bound=nn.Module)

_TF32_SWITCHES: tuple[Any, ...] = (
    torch.backends.cuda.matmul,
    torch.backends.cudnn.conv,  # type: ignore[attr-defined]
    torch.backends.cudnn.rnn,
)


def apply_training_options(model: ModuleT, policy: Policy) -> ModuleT:
    """Do to the model, in place, what the policy was found with: activation checkpointing, channels_last weights, TF32.

    Call it before `apply_policy`. TF32 is switched for the whole process. What the training loop itself does is left to
    it: channels_last inputs (`x.to(memory_format=torch.channels_last)`), accumulation, `torch.compile`.

    Raises:
        ApplyError: a checkpointed name matches no module of this model; the model is unchanged.
    """
    options = policy.training
    if options is None:
        return model
    checkpoint_modules(model, options.checkpoint)
    if options.channels_last:
        model.to(memory_format=torch.channels_last)
    set_tf32(options.tf32)
    return model


def set_tf32(enabled: bool | None) -> None:
    """Let FP32 products, convolutions and recurrent layers on CUDA run in TF32, or not; None leaves them."""
    if enabled is not None:
        for switch in _TF32_SWITCHES:
            switch.fp32_precision = "tf32" if enabled else "ieee"


def uses_tf32() -> bool | None:
    """Return whether FP32 products, convolutions and recurrent layers run in TF32; None where they differ."""
    found = {switch.fp32_precision == "tf32" for switch in _TF32_SWITCHES}
    return found.pop() if len(found) == 1 else None


def warn_of_missing_options(model: nn.Module, policy: Policy) -> None:
    """Warn once, with a list of what the policy was found with and this model does not have.

    torch.compile is looked at in the first training forward: a policy is applied before the model is compiled.
    """
    options = policy.training
    if options is None:
        return
    missing = []
    structure = read_structure(model)
    if not _is_checkpointed(structure, options.checkpoint):
        missing.append(f"checkpointing of {', '.join(options.checkpoint)}")
    inner = unwrap(model)
    if options.channels_last and not _is_channels_last(inner):
        missing.append("channels_last weights")
    is_cuda = any(parameter.is_cuda for parameter in inner.parameters())
    if options.tf32 is not None and is_cuda and uses_tf32() is not options.tf32:
        missing.append("TF32 switched " + ("on" if options.tf32 else "off"))
    if missing:
        message = (
            f"the policy was found with {'; '.join(missing)}, which this model does not have: its memory and speed will"
            " differ; autoprec.apply.apply_training_options(model, policy) before apply_policy sets them"
        )
        warnings.warn(message, PrecisionWarning, stacklevel=4)


def _is_checkpointed(structure: Structure, names: tuple[str, ...]) -> bool:
    try:
        return set(matched_modules(structure, names)) <= set(checkpointed_modules(structure))
    except ApplyError:  # another model: what is not there is not checkpointed
        return False


def _is_channels_last(model: nn.Module) -> bool:
    """Whether every four-dimensional weight lies in channels_last; a model without one has nothing to convert."""
    return all(p.is_contiguous(memory_format=torch.channels_last) for p in model.parameters() if p.dim() == 4)
