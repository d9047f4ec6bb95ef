"""What changed between the place a policy was found and the place it is applied, and what a device cannot run."""

from __future__ import annotations

import warnings

import torch
from torch import nn

from autoprec.errors import ApplyError, PrecisionWarning
from autoprec.policy import Policy

__all__ = ["check_device", "differences_from", "warn_of_differences", "has_native_bf16"]


def has_native_bf16(device: torch.device) -> bool:
    """Whether the device computes BF16 itself (compute capability 8.0 and later on CUDA); emulation does not count."""
    if device.type == "cuda" and torch.cuda.is_available():
        with torch.cuda.device(device):
            return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return True


def check_device(model: nn.Module, policy: Policy) -> None:
    """Refuse a precision that the model's device cannot run.

    Raises:
        ApplyError: BF16 on a CUDA device without BF16 units, or `autocast` on a device type that has none.
    """
    for device in {parameter.device for parameter in model.parameters()} or {torch.device("cpu")}:
        if device.type == "meta":
            continue
        if "bf16" in policy.low_precisions and not has_native_bf16(device):
            name = torch.cuda.get_device_name(device)
            raise ApplyError(f"bf16 needs a GPU with BF16 units (compute capability 8.0 and later); {name} has none")
        if "autocast" in policy.precisions and not torch.amp.is_autocast_available(device.type):
            raise ApplyError(f"autocast is not available on device type {device.type!r}; allowed: fp32, fp16, bf16")


def warn_of_differences(model: nn.Module, policy: Policy) -> None:
    """Warn once, with a list of what differs from the provenance of the policy."""
    differences = differences_from(policy, model)
    if differences:
        message = f"the policy was found elsewhere: {'; '.join(differences)}; verify it here before a long run"
        warnings.warn(message, PrecisionWarning, stacklevel=4)


def differences_from(policy: Policy, model: nn.Module) -> list[str]:
    """List where the device of `model` and torch here differ from the policy's provenance: "torch 2.12 -> 2.14"."""
    found = policy.provenance
    if found is None:
        return []
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    differences = []
    if found.device_type is not None and found.device_type != device.type:
        differences.append(f"device {found.device_type} -> {device.type}")
    elif device.type == "cuda" and found.device_name not in (None, torch.cuda.get_device_name(device)):
        differences.append(f"GPU {found.device_name} -> {torch.cuda.get_device_name(device)}")
    torch_then = found.versions.get("torch")
    if torch_then is not None and _minor(torch_then) != _minor(torch.__version__):
        differences.append(f"torch {torch_then} -> {torch.__version__}")
    return differences


def _minor(version: str) -> tuple[str, ...]:
    return tuple(version.split(".")[:2])
