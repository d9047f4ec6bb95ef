"""Install a precision policy on any model, exactly and reversibly; build its optimizer and grad scaler."""

from autoprec.apply.checkpointing import checkpoint_modules, remove_checkpointing
from autoprec.apply.fit import PolicyFit, check_fit
from autoprec.apply.install import applied_policy, apply_policy, remove_policy, suspend_policy
from autoprec.apply.optimizers import (
    IMPLEMENTATIONS,
    PolicyGradScaler,
    build_grad_scaler,
    build_optimizer,
    configure_optimizer,
    grad_scaler_arguments,
)
from autoprec.apply.plan import describe_model
from autoprec.apply.structure import read_structure
from autoprec.apply.training_options import apply_training_options, set_tf32

__all__ = [
    "IMPLEMENTATIONS",
    "PolicyFit",
    "PolicyGradScaler",
    "applied_policy",
    "apply_policy",
    "apply_training_options",
    "build_grad_scaler",
    "build_optimizer",
    "check_fit",
    "configure_optimizer",
    "checkpoint_modules",
    "describe_model",
    "grad_scaler_arguments",
    "read_structure",
    "remove_checkpointing",
    "remove_policy",
    "set_tf32",
    "suspend_policy",
]
