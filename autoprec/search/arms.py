"""Policies that every study runs before its sampler: the baselines and the warm starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autoprec.policy import Policy
from autoprec.search.decision import Decision
from autoprec.search.parameters import AMSGRAD, AUTOCAST_DTYPE, AUTOCAST_HALF_TYPES, EPS, Parameters, ParameterValue
from autoprec.search.space import Choice, matches_any

__all__ = [
    "AUTOCAST_BF16",
    "AUTOCAST_FP16",
    "Arm",
    "BASELINES",
    "FP32",
    "PRESENT_POLICY",
    "baselines",
    "is_scaled",
    "is_stock",
    "scaled_autocast",
    "scaled_name",
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

HALF = "half everywhere"
NORMS = ("*Norm*",)
ATTENTION = ("*Attention*", "*Attn*", "*Softmax*")
"""Where a softmax is: under autocast that is FP32 and the products beside it are half."""
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
    return name in BASELINES or name.startswith(PRESENT_POLICY) or is_scaled(name)


def scaled_autocast(parameters: Parameters, scaler: Mapping[str, ParameterValue]) -> list[Arm]:
    """Return stock autocast FP16 with the grad scaler that a profile chose; nothing where that is torch's default.

    It costs no memory and no time, and is what the search of a scaler is for before all else.
    """
    values = parameters.values(lambda decision: "autocast", {**scaler, AUTOCAST_DTYPE: "fp16"})
    chosen = parameters.policy(values).grad_scaler
    if chosen is None:
        return []
    policy = BASELINES[AUTOCAST_FP16].replace(grad_scaler=chosen)
    return [Arm(scaled_name(chosen.init_scale), values, policy)]


def scaled_name(init_scale: float) -> str:
    return f"{SCALED}{init_scale:g}"


def is_scaled(name: str) -> bool:
    """Whether an arm is stock autocast FP16 under another grad scaler than torch's default."""
    return name.startswith(SCALED)


def baselines(parameters: Parameters, *, native_bf16: bool) -> list[Arm]:
    """Return FP32 and stock autocast in the study's dtype; an FP16 study has BF16's too where that is native."""
    dtypes: dict[str, ParameterValue] = {AUTOCAST_FP16: "fp16", AUTOCAST_BF16: "bf16"}
    if parameters.dtype in ("bf16", "mixed"):
        dtypes.pop(AUTOCAST_FP16)
    elif not native_bf16:
        dtypes.pop(AUTOCAST_BF16)
    first = {AUTOCAST_DTYPE: parameters.families[0]}
    return [
        Arm(FP32, parameters.values(lambda decision: "fp32", first), BASELINES[FP32]),
        *(
            Arm(name, parameters.values(lambda decision: "autocast", {AUTOCAST_DTYPE: dtype}), BASELINES[name])
            for name, dtype in dtypes.items()
        ),
    ]


def warm_starts(parameters: Parameters) -> list[Arm]:
    """Return what practice does, in the study's dtype; where both are searched, in each, and the name says which."""
    if parameters.dtype == "fp16":
        return _fp16_starts(parameters)
    if parameters.dtype != "both":
        return _bf16_starts(parameters)
    values = {
        f"{name}, {dtype}": {**chosen, AUTOCAST_DTYPE: dtype}
        for dtype in parameters.families
        for name, chosen in {**_practice(parameters), HALF: parameters.values(lambda decision: parameters.half)}.items()
    }
    return _arms(parameters, values)


def _fp16_starts(parameters: Parameters) -> list[Arm]:
    """Return the family's practice, half everywhere, and the published recipe: the deep end in FP32."""

    def deep_end(decision: Decision) -> Choice:
        return "fp32" if decision.depth >= DEEP_END_START else parameters.half

    values = {
        **_practice(parameters),
        HALF: parameters.values(lambda decision: parameters.half),
        "deep end in fp32": parameters.values(deep_end, PUBLISHED_SETTINGS),
    }
    return _arms(parameters, values)


def _bf16_starts(parameters: Parameters) -> list[Arm]:
    """Return the family's practice, half everywhere, and what autocast keeps in FP32 given to half part by part."""
    half = parameters.half

    def norms(decision: Decision) -> Choice:
        return half if matches_any(decision.lead_type, NORMS) else "autocast"

    def stream(decision: Decision) -> Choice:
        return "autocast" if matches_any(decision.lead_type, (*ATTENTION, *AUTOCAST_HALF_TYPES)) else half

    def softmax(decision: Decision) -> Choice:
        return "autocast" if matches_any(decision.lead_type, ATTENTION) else half

    values = {
        **_practice(parameters),
        HALF: parameters.values(lambda decision: half),
        "norms in half": parameters.values(norms),
        "residual stream in half": parameters.values(stream),
        "half but softmax": parameters.values(softmax),
    }
    if parameters.dtype == "mixed":
        values["bf16 with norms in fp16"] = parameters.values(
            lambda decision: "fp16" if matches_any(decision.lead_type, NORMS) else "bf16"
        )
    return _arms(parameters, values)


def _practice(parameters: Parameters) -> dict[str, dict[str, ParameterValue]]:
    """Return what the search space starts its decisions from; where it says nothing, half but norms and head."""
    last = parameters.free_decisions[-1:]

    def spare_norms_and_head(decision: Decision) -> Choice:
        return "fp32" if decision in last or matches_any(decision.lead_type, NORMS) else parameters.half

    if any(decision.start for decision in parameters.free_decisions):
        return {"practice of the family": parameters.values(lambda decision: decision.start or "autocast")}
    return {"half but norms and head": parameters.values(spare_norms_and_head)}


def _arms(parameters: Parameters, values: Mapping[str, Mapping[str, ParameterValue]]) -> list[Arm]:
    return [Arm(name, chosen, parameters.policy(chosen)) for name, chosen in values.items()]
