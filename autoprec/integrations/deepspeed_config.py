"""A policy as a DeepSpeed configuration. Needs no DeepSpeed: it is data.

DeepSpeed has one precision for the whole model, so the section is that of the precision that most parameters have, and
each unit with another is said to be lost. Read in DeepSpeed 0.19: `runtime/config.py`, `precision_config.py`,
`torch_autocast.py` and `fp16/loss_scaler.py`.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

from autoprec.errors import UsageError
from autoprec.integrations.exported import (
    Exported,
    as_json,
    listed,
    lost_optimizer_settings,
    lost_training_options,
    scaler_settings,
    target_batch_size,
)
from autoprec.policy import GradScalerSettings, Policy, Precision, known_precisions

__all__ = ["deepspeed_config"]

ZERO_STAGES = (0, 1, 2, 3)
KEEPS_POLICY = (
    "a policy without FP16 is kept whole without these sections: apply_policy(model, policy) before "
    "deepspeed.initialize, ZeRO stage 0 to 2"
)
NO_INPUT_CASTS = "DeepSpeed's bf16 section casts no inputs: give the engine floating inputs in BF16"
NO_CLIPPING = (
    "gradient_clipping is 0, where DeepSpeed's own default clips at 1; set the norm that your training clips at"
)


def deepspeed_config(policy: Policy, *, zero_stage: int = 1, micro_batch_size: int | None = None) -> Exported:
    """Write the fp16, bf16, torch_autocast and zero_optimization sections that come nearest to a policy.

    Args:
        zero_stage: 0 (off) to 3; the policy says nothing about it.
        micro_batch_size: samples of one process and micro-batch, which DeepSpeed wants to know; None takes the batch
            that the policy was found for, else 1.

    Raises:
        UsageError: no such stage, or no positive batch size.
    """
    if zero_stage not in ZERO_STAGES:
        raise UsageError(f"ZeRO stage {zero_stage}; allowed: {', '.join(map(str, ZERO_STAGES))}")
    if micro_batch_size is None:
        micro_batch_size = target_batch_size(policy) or 1
    if micro_batch_size < 1:
        raise UsageError(f"micro-batch size {micro_batch_size}; at least 1")
    section = _main_precision(policy)
    sections, lost = _sections(policy, section, zero_stage)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": micro_batch_size,
        "gradient_accumulation_steps": policy.training.accumulation_steps if policy.training is not None else 1,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": zero_stage},
        "zero_allow_untested_optimizer": True,
        **sections,
    }
    lost = [*_lost_units(policy, section), *lost, *lost_optimizer_settings(policy), *lost_training_options(policy)]
    notes = [NO_CLIPPING, *([NO_INPUT_CASTS] if section == "bf16" else [])]
    if not policy.needs_grad_scaler and section != "fp32":
        notes.append(KEEPS_POLICY)
    return Exported(as_json(config), tuple(lost), tuple(notes))


def _main_precision(policy: Policy) -> Precision:
    """Return the precision that most parameters have; the default where the policy knows no parameters."""
    counts: Counter[Precision] = Counter()
    modules = policy.model.modules if policy.model is not None else {}
    for name, (precision, _) in known_precisions(policy).items():
        if name in modules:
            counts[precision] += sum(math.prod(shape) for shape in modules[name].parameters.values())
    return counts.most_common(1)[0][0] if sum(counts.values()) else policy.default


def _sections(policy: Policy, section: Precision, zero_stage: int) -> tuple[dict[str, Any], list[str]]:
    off: dict[str, Any] = {"fp16": {"enabled": False}, "bf16": {"enabled": False}, "torch_autocast": {"enabled": False}}
    settings = scaler_settings(policy)
    if section == "fp16":
        scaler, lost = _loss_scaling(settings)
        lost.append("FP32 gradients: DeepSpeed's fp16 keeps the gradients of the masters in FP16 until its step")
        return {**off, "fp16": {"enabled": True, **scaler}}, lost
    if section == "bf16":
        sections = {**off, "bf16": {"enabled": True}}
        if zero_stage:
            sections["data_types"] = {"grad_accum_dtype": "fp32"}
            return sections, []
        return sections, ["FP32 gradients: without ZeRO DeepSpeed accumulates them in BF16"]
    if section == "autocast":
        dtype = "float16" if policy.dtype == "fp16" else "bfloat16"
        lost = []
        if policy.dtype == "fp16" and settings != GradScalerSettings():
            lost = [f"the grad scaler's {_changed(settings)}: DeepSpeed's autocast uses torch's own defaults"]
        return {**off, "torch_autocast": {"enabled": True, "dtype": dtype}}, lost
    return off, []


def _loss_scaling(settings: GradScalerSettings) -> tuple[dict[str, Any], list[str]]:
    """DeepSpeed knows powers of two, doubles and halves; a hysteresis of 1 backs off at every overflow, as torch."""
    power = math.floor(math.log2(settings.init_scale))
    lost = []
    if 2.0**power != settings.init_scale:
        lost.append(f"init_scale {settings.init_scale:g}: a power of two is needed, written as {2.0**power:g}")
    if power < 0:
        lost.append(f"init_scale {settings.init_scale:g}: DeepSpeed's floor of the loss scale is 1")
    if settings.growth_factor != 2.0:
        lost.append(f"growth_factor {settings.growth_factor:g}: DeepSpeed's is 2")
    if settings.backoff_factor != 0.5:
        lost.append(f"backoff_factor {settings.backoff_factor:g}: DeepSpeed's is 0.5")
    scaler = {
        "auto_cast": True,
        "loss_scale": 0,
        "initial_scale_power": max(power, 0),
        "loss_scale_window": settings.growth_interval,
        "hysteresis": 1,
        "min_loss_scale": 1,
    }
    return scaler, lost


def _changed(settings: GradScalerSettings) -> str:
    default = GradScalerSettings()
    return ", ".join(f"{name} {value:g}" for name, value in settings if value != getattr(default, name))


def _lost_units(policy: Policy, section: Precision) -> list[str]:
    """Say of each precision that is not the section's which units, or rules, have it."""
    known = known_precisions(policy) or {rule: (p, rule) for rule, p in policy.modules.items()}
    by_precision: dict[Precision, list[str]] = {}
    for name, (precision, _) in known.items():
        if precision != section:
            by_precision.setdefault(precision, []).append(name)
    globs = {rule: p for rule, p in policy.modules.items() if rule not in known and p != section}
    if policy.model is None:
        for rule, precision in globs.items():
            by_precision.setdefault(precision, []).append(rule)
    if policy.default != section and (policy.model is None or not policy.model.modules):
        by_precision.setdefault(policy.default, []).append("whatever no rule names")
    gets = f"autocast {policy.dtype}" if section == "autocast" else section
    return [
        f"{precision} of {len(names)} units, which compute in {gets}: {listed(names)}"
        for precision, names in by_precision.items()
    ]
