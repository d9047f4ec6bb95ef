"""A policy in another tool's own format: the text of its file, and what of the policy that file cannot say."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autoprec.policy import GradScalerSettings, Policy

__all__ = [
    "Exported",
    "as_json",
    "listed",
    "lost_optimizer_settings",
    "lost_training_options",
    "scaler_settings",
    "target_batch_size",
]


@dataclass(frozen=True, slots=True)
class Exported:
    """What an export gives.

    Attributes:
        text: the file's content; ends with a line feed.
        lost: what the tool does otherwise than the policy says, one sentence each.
        notes: what the person has to do with the file.
    """

    text: str
    lost: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def target_batch_size(policy: Policy) -> int | None:
    """Return the batch of the real run that the policy was found for, None where its file does not say."""
    settings = policy.provenance.settings if policy.provenance is not None else {}
    found = settings.get("target_batch_size")
    return found if isinstance(found, int) and not isinstance(found, bool) and found > 0 else None


def as_json(data: Mapping[str, Any]) -> str:
    """Return strict JSON text of a file."""
    return json.dumps(data, indent=2, allow_nan=False) + "\n"


def lost_optimizer_settings(policy: Policy) -> list[str]:
    """Say which optimizer settings of the policy a configuration file does not carry."""
    found = policy.optimizer
    settings = {} if found is None else {"eps": found.eps, "amsgrad": found.amsgrad}
    named = ", ".join(f"{key}={value!r}" for key, value in settings.items() if value is not None)
    return [f"optimizer settings {named}: build the optimizer with autoprec.build_optimizer"] if named else []


def lost_training_options(policy: Policy) -> list[str]:
    """Say which training options of the policy a configuration file does not carry, and what sets them."""
    changed = policy.training.changed if policy.training is not None else {}
    carried = ("accumulation_steps", "optimizer_implementation", "compile")
    named = [name for name in changed if name not in carried]
    lost = [f"training options {', '.join(named)}: autoprec.apply.apply_training_options sets them"] if named else []
    return [*lost, *(["compile: call torch.compile after the policy is applied"] if "compile" in changed else [])]


def listed(names: list[str], *, count: int = 8) -> str:
    """Return the first names, and how many more there are."""
    return ", ".join(names[:count]) + (f" and {len(names) - count} more" if len(names) > count else "")


def scaler_settings(policy: Policy) -> GradScalerSettings:
    """The policy's, or torch's own defaults where it says nothing."""
    return policy.grad_scaler or GradScalerSettings()
