"""Policies that every study runs before its sampler: the baselines and the warm starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autoprec.policy import Policy, Precision
from autoprec.search.decision import Decision
from autoprec.search.parameters import AMSGRAD, AUTOCAST_DTYPE, EPS, Parameters, ParameterValue
from autoprec.search.space import matches_any

__all__ = [
    "AUTOCAST_BF16",
    "AUTOCAST_FP16",
    "Arm",
    "BASELINES",
    "FP32",
    "PRESENT_POLICY",
    "baselines",
    "is_stock",
    "scaled_autocast",
    "warm_starts",
]

FP32 = "fp32"
AUTOCAST_FP16 = "autocast fp16"
AUTOCAST_BF16 = "autocast bf16"
BASELINES: Mapping[str, Policy] = {
    FP32: Policy(default="fp32"),
    AUTOCAST_FP16: Policy(default="autocast", dtype="fp16"),
    AUTOCAST_BF16: Policy(default="autocast", dtype="bf16"),
}
PRESENT_POLICY = "present policy"
"""Begins the name of the arm of a policy file that the user runs today (`--compare FILE`)."""
SCALED = f"{AUTOCAST_FP16}, init_scale "

NORMS = ("*Norm*",)
DEEP_END_START = 0.45
"""Share of the units before the deep end: in torchvision's ResNets this is where layer3 begins."""

PUBLISHED_SETTINGS: Mapping[str, ParameterValue] = {
    "grad_scaler/init_scale": 32768.0,
    "grad_scaler/growth_factor": 1.5,
    "grad_scaler/backoff_factor": 0.4,
    "grad_scaler/growth_interval": 1000,
    EPS: 1e-7,
    AMSGRAD: True,
}
"""Scaler and Adam settings of the published ResNet-50 recipe, kept as a claim to test."""


@dataclass(frozen=True, slots=True)
class Arm:
    """A named policy with the parameter values that stand for it in the study."""

    name: str
    values: Mapping[str, ParameterValue]
    policy: Policy

    @property
    def is_baseline(self) -> bool:
        """Whether it runs in every search, whatever the number of trials."""
        return is_stock(self.name)


def is_stock(name: str) -> bool:
    """Whether an arm is what one has without a search: FP32, autocast with whatever grad scaler, or what runs today."""
    return name in BASELINES or name.startswith(PRESENT_POLICY) or name.startswith(SCALED)


def scaled_autocast(parameters: Parameters, scaler: Mapping[str, ParameterValue]) -> list[Arm]:
    """Return stock autocast FP16 with the grad scaler that a profile chose; nothing where that is torch's default.

    It costs no memory and no time, and is what the search of a scaler is for before all else.
    """
    values = parameters.values(lambda decision: "autocast", scaler)
    chosen = parameters.policy(values).grad_scaler
    if chosen is None:
        return []
    policy = BASELINES[AUTOCAST_FP16].replace(grad_scaler=chosen)
    return [Arm(f"{SCALED}{chosen.init_scale:g}", values, policy)]


def baselines(parameters: Parameters, *, native_bf16: bool) -> list[Arm]:
    """Return FP32, stock autocast FP16 and, where the target has it natively, BF16."""
    low = parameters.values(lambda decision: "autocast")
    arms = [
        Arm(FP32, parameters.values(lambda decision: "fp32"), BASELINES[FP32]),
        Arm(AUTOCAST_FP16, low, BASELINES[AUTOCAST_FP16]),
    ]
    if native_bf16:
        arms.append(Arm(AUTOCAST_BF16, {**low, AUTOCAST_DTYPE: "bf16"}, BASELINES[AUTOCAST_BF16]))
    return arms


def warm_starts(parameters: Parameters) -> list[Arm]:
    """Return the family's practice, half everywhere, and the published recipe: the deep end in FP32.

    The practice is what the search space starts its decisions from; where it says nothing, half but norms and head.
    """
    last = parameters.free_decisions[-1:]

    def spare_norms_and_head(decision: Decision) -> Precision:
        return "fp32" if decision in last or matches_any(decision.lead_type, NORMS) else "fp16"

    def deep_end(decision: Decision) -> Precision:
        return "fp32" if decision.depth >= DEEP_END_START else "fp16"

    if any(decision.start for decision in parameters.free_decisions):
        practice = {"practice of the family": parameters.values(lambda decision: decision.start or "autocast")}
    else:
        practice = {"half but norms and head": parameters.values(spare_norms_and_head)}
    values = {
        **practice,
        "half everywhere": parameters.values(lambda decision: "fp16"),
        "deep end in fp32": parameters.values(deep_end, PUBLISHED_SETTINGS),
    }
    return [Arm(name, chosen, parameters.policy(chosen)) for name, chosen in values.items()]
