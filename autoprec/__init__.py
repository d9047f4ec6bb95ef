"""Find, prove and apply a per-layer precision policy for a PyTorch training.

The public names load on first use, so that `import autoprec` and the command line start without torch.
"""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autoprec.apply import (
        apply_policy,
        build_grad_scaler,
        build_optimizer,
        remove_policy,
        suspend_policy,
    )
    from autoprec.emulation import emulate
    from autoprec.errors import AutoprecError
    from autoprec.policy import Policy, load_policy
    from autoprec.search import search_policy, verify_policy
    from autoprec.tasks import Task

__version__ = "0.1.0"

logging.getLogger("autoprec").addHandler(logging.NullHandler())  # silent unless the program that uses it listens

__all__ = [
    "Policy",
    "load_policy",
    "apply_policy",
    "remove_policy",
    "suspend_policy",
    "build_optimizer",
    "build_grad_scaler",
    "emulate",
    "Task",
    "search_policy",
    "verify_policy",
    "AutoprecError",
]

_ROOMS = {
    "Policy": "policy",
    "load_policy": "policy",
    "apply_policy": "apply",
    "remove_policy": "apply",
    "suspend_policy": "apply",
    "build_optimizer": "apply",
    "build_grad_scaler": "apply",
    "emulate": "emulation",
    "Task": "tasks",
    "search_policy": "search",
    "verify_policy": "search",
    "AutoprecError": "errors",
}


def __getattr__(name: str) -> Any:
    room = _ROOMS.get(name)
    if room is None:
        raise AttributeError(f"module 'autoprec' has no attribute {name!r}")
    return getattr(importlib.import_module(f"autoprec.{room}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
