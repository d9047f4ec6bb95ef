"""Seventeen policies a task, from harmless to harmful; "guarded" ones keep in FP32 what FP16 is known to break."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autoprec.policy import Policy
from autoprec.policy.evidence import GradScalerSettings, OptimizerSettings, Precision

__all__ = ["FP32", "policies_of"]

FP32 = Policy(default="fp32")
NEVER = 10**9
"""A growth interval that no run here reaches: the loss scale is fixed."""


@dataclass(frozen=True, slots=True)
class Parts:
    """Names of a network's parts, as globs: what FP16 starves, what overflows in it, the norms, the stream between.

    Through `last` goes every gradient but the head's.
    """

    faint: str
    loud: str
    norms: str
    stream: str
    last: str


TRANSFORMER = Parts("faint", "loud", "*norm*", "blocks*", "norm")
PARTS = {
    "cnn": Parts("stem", "blocks.1.convolution", "*norm*", "blocks*", "blocks"),
    "vit": TRANSFORMER,
    "mlp": Parts("stem", "loud", "*norm*", "head", "norm"),
    "unet": Parts("stem", "middle.0", "*.1", "up*", "up"),
    "causal": TRANSFORMER,
    "masked": TRANSFORMER,
    "lstm": Parts("faint", "loud", "*norm*", "lstm", "norm"),
}


def policies_of(task: str) -> dict[str, Policy]:
    """Return the policies by name: the task's own parts in half, and loss scales and eps that are the same for all."""
    parts = PARTS[task]
    guarded: dict[str, Precision] = {parts.faint: "fp32", parts.loud: "fp32"}
    in_half: dict[str, dict[str, Precision]] = {
        "norms fp16, guarded": {parts.norms: "fp16", **guarded},
        "stream fp16, guarded": {parts.stream: "fp16", **guarded},
        "faint unit fp16": {parts.faint: "fp16", parts.loud: "fp32"},
        "loud unit fp16": {parts.faint: "fp32", parts.loud: "fp16"},
    }
    last: dict[str, Precision] = {parts.last: "fp16", **guarded}
    return {
        **{
            f"last part fp16, loss scale 2^-{power} for good": Policy(
                default="fp32",
                modules=last,
                grad_scaler=GradScalerSettings(init_scale=2.0**-power, growth_interval=NEVER),
            )
            for power in (22, 8)
        },
        "autocast bf16": Policy(dtype="bf16"),
        "bf16 everywhere": Policy(default="bf16", dtype="bf16"),
        "autocast bf16, eps 1e-3": Policy(dtype="bf16", optimizer=OptimizerSettings(eps=1e-3)),
        "autocast fp16, guarded": Policy(modules=guarded),
        "fp16 everywhere, guarded": Policy(default="fp16", modules=guarded),
        "fp16 everywhere": Policy(default="fp16"),
        **{name: Policy(modules=modules) for name, modules in in_half.items()},
        **{f"loss scale {name}, guarded": _scaled(guarded, scaler) for name, scaler in SCALERS.items()},
    }


SCALERS = {
    "1 for good": GradScalerSettings(init_scale=1.0, growth_interval=NEVER),
    "2^-8 for good": GradScalerSettings(init_scale=2.0**-8, growth_interval=NEVER),
    "2^-14 for good": GradScalerSettings(init_scale=2.0**-14, growth_interval=NEVER),
    "from 2^40": GradScalerSettings(init_scale=2.0**40),
    "2^40 falling by 1 %": GradScalerSettings(init_scale=2.0**40, backoff_factor=0.99),
}


def _scaled(modules: Mapping[str, Precision], grad_scaler: GradScalerSettings) -> Policy:
    return Policy(modules=dict(modules), grad_scaler=grad_scaler)
