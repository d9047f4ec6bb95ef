"""A policy as the configuration files of Accelerate and Lightning. Needs neither: it is data.

Both say the same: no precision of the framework's own, and the class of autoprec that brings the policy. Read in
Accelerate 1.15 (`commands/config/config_args.py`) and Lightning 2.6 (`pytorch/cli.py`).
"""

from __future__ import annotations

from autoprec.integrations.exported import Exported, lost_training_options
from autoprec.policy import Policy

__all__ = ["accelerate_config", "lightning_config"]


def accelerate_config(policy: Policy, *, policy_file: str) -> Exported:
    """Write a file for `accelerate launch --config_file`: one process, and no mixed precision beside the policy's.

    Args:
        policy_file: the name of the policy's file, for the line of code that goes with it.
    """
    steps = _accumulation_steps(policy)
    more = f", gradient_accumulation_steps={steps}" if steps > 1 else ""
    lines = [
        "# accelerate launch --config_file THIS_FILE train.py, where train.py has, instead of Accelerator(...):",
        "#   from autoprec.integrations.accelerate import PolicyAccelerator",
        f"#   accelerator = PolicyAccelerator({policy_file!r}{more})",
        "compute_environment: LOCAL_MACHINE",
        "debug: false",
        "distributed_type: 'NO'",
        "machine_rank: 0",
        "main_training_function: main",
        "mixed_precision: 'no'",
        "num_machines: 1",
        "num_processes: 1",
        "use_cpu: false",
    ]
    note = "for several processes set distributed_type and num_processes; mixed_precision stays 'no'"
    return Exported("\n".join(lines) + "\n", tuple(lost_training_options(policy)), (note,))


def lightning_config(policy: Policy, *, policy_file: str) -> Exported:
    """Write a file for `LightningCLI --config`: the precision plugin, and no `precision` beside it.

    Args:
        policy_file: the name of the policy's file, as the training will find it.
    """
    steps = _accumulation_steps(policy)
    lines = [
        "# In code: lightning.Trainer(plugins=PolicyPrecision(...)), and no `precision`.",
        "trainer:",
        "  plugins:",
        "    - class_path: autoprec.integrations.lightning.PolicyPrecision",
        "      init_args:",
        f"        policy: {_quoted(policy_file)}",
        *([f"  accumulate_grad_batches: {steps}"] if steps > 1 else []),
    ]
    note = "a policy that was found on a part of the LightningModule needs its name: init_args.module, such as model"
    return Exported("\n".join(lines) + "\n", tuple(lost_training_options(policy)), (note,))


def _accumulation_steps(policy: Policy) -> int:
    return policy.training.accumulation_steps if policy.training is not None else 1


def _quoted(text: str) -> str:
    """Return a YAML string in single quotes."""
    return "'" + text.replace("'", "''") + "'"
