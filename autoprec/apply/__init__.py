"""Install a precision policy on any model, exactly and reversibly; build its optimizer and grad scaler."""

from autoprec.apply.install import applied_policy, apply_policy, remove_policy, suspend_policy
from autoprec.apply.optimizers import build_grad_scaler, build_optimizer
from autoprec.apply.plan import describe_model
from autoprec.apply.structure import read_structure

__all__ = [
    "applied_policy",
    "apply_policy",
    "build_grad_scaler",
    "build_optimizer",
    "describe_model",
    "read_structure",
    "remove_policy",
    "suspend_policy",
]
