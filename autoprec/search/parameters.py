"""The parameters of a study: their distributions, and the way from their values to a policy and back."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution

from autoprec.errors import UsageError
from autoprec.policy import GradScalerSettings, LowPrecision, OptimizerSettings, Policy, Precision
from autoprec.search.decision import Decision
from autoprec.search.space import Choice, Range, SearchSpace, matches_any
from autoprec.search.study_dtype import StudyDtype, halves

__all__ = [
    "AMSGRAD",
    "AUTOCAST_DTYPE",
    "EPS",
    "Parameters",
    "ParameterValue",
    "build_parameters",
    "policy_key",
]

ParameterValue = str | bool | int | float

AUTOCAST_DTYPE = "autocast/dtype"
EPS = "optimizer/eps"
AMSGRAD = "optimizer/amsgrad"
AUTOCAST_HALF_TYPES = ("Conv[123]d", "ConvTranspose[123]d", "Linear", "Bilinear")
"""Classes that autocast runs in half as a whole, so that `autocast` and true half are one precision for them."""


@dataclass(frozen=True, slots=True)
class Parameters:
    """Every parameter of one study.

    Attributes:
        decisions: all decisions, the pinned ones included (those are no parameters).
        distributions: name -> distribution, in the order of the decisions, then scaler, optimizer, dtype.
        defaults: name -> the value that leaves torch's or the task's setting as it is; none for a sampled dtype.
        dtype: what `autocast` and half are in this study.
        followers: class globs of units that follow the half of the layer before them.
        fp32_code: modules whose own code, between the units, cannot run under autocast; "" is the model itself.
    """

    decisions: tuple[Decision, ...]
    distributions: Mapping[str, BaseDistribution]
    defaults: Mapping[str, ParameterValue]
    followers: tuple[str, ...] = ()
    fp32_code: frozenset[str] = frozenset()
    dtype: StudyDtype = "fp16"

    def values(
        self, choose: Callable[[Decision], Choice], changes: Mapping[str, ParameterValue] | None = None
    ) -> dict[str, ParameterValue]:
        """Return a value for each parameter: `choose` where it is offered, else `autocast`; the defaults elsewhere.

        A change whose value the distribution does not hold, or whose parameter this study lacks, is left out.
        """
        chosen: dict[str, ParameterValue] = dict(self.defaults)
        for decision in self.free_decisions:
            wanted = choose(decision)
            chosen[decision.parameter] = wanted if wanted in decision.choices else "autocast"
        for name, value in (changes or {}).items():
            if name in self.distributions and _holds(self.distributions[name], value):
                chosen[name] = value
        return chosen

    def random_values(self, rng: np.random.Generator, fixed: Mapping[str, ParameterValue]) -> dict[str, ParameterValue]:
        """Draw a value for each parameter, evenly (on a logarithmic scale where it has one); `fixed` are not drawn."""
        return {n: fixed[n] if n in fixed else _draw(d, rng) for n, d in self.distributions.items()}

    @property
    def fixed(self) -> dict[str, ParameterValue]:
        """Parameters that no sampler draws: in an FP16 study autocast in BF16 is a baseline and nothing else."""
        return {n: value for n, value in self.defaults.items() if n == AUTOCAST_DTYPE}

    @property
    def half(self) -> Choice:
        """The choice that is true half in the dtype of `autocast`."""
        return halves(self.dtype)[0]

    @property
    def families(self) -> tuple[LowPrecision, ...]:
        """The dtypes that `autocast` may have in a policy that this study samples."""
        return ("bf16", "fp16") if self.dtype == "both" else ("fp16",) if self.dtype == "fp16" else ("bf16",)

    @property
    def has_grad_scaler(self) -> bool:
        """Whether any policy of this study may need a grad scaler."""
        return self.dtype != "bf16"

    @property
    def free_decisions(self) -> list[Decision]:
        return [decision for decision in self.decisions if not decision.is_pinned]

    def policy(self, values: Mapping[str, Any]) -> Policy:
        """Build the policy that `values` stand for.

        The default is `autocast`; where every decision is `fp32` it is `fp32`, so that code outside the units is too.
        """
        dtype = values.get(AUTOCAST_DTYPE, self.families[0])
        wanted = [(d, d.choices[0] if d.is_pinned else values[d.parameter]) for d in self.decisions]
        chosen = [(d, dtype if choice == "half" else choice) for d, choice in wanted]
        is_fp32 = "" in self.fp32_code or all(choice == "fp32" for _, choice in chosen)
        default: Precision = "fp32" if is_fp32 else "autocast"
        modules: dict[str, Precision] = {} if is_fp32 else dict.fromkeys(sorted(self.fp32_code), "fp32")
        units = {name: choice for d, choice in chosen for name in d.units}
        modules |= {name: choice for name, choice in units.items() if choice != self._inherited(name, default)}
        plain = Policy(default=default, dtype=dtype, modules=modules)
        return plain.replace(
            grad_scaler=self._grad_scaler(values) if plain.needs_grad_scaler else None,
            optimizer=self._optimizer(values),
        )

    def precision(self, policy: Policy, decision: Decision) -> Precision:
        """Return the precision that a policy of this study gives to a decision."""
        name = next(iter(decision.units))
        return policy.modules.get(name, self._inherited(name, policy.default))

    def with_autocast(self, policy: Policy, decision: Decision) -> Policy:
        """Return the policy with one decision left to autocast."""
        modules = {name: choice for name, choice in policy.modules.items() if name not in decision.units}
        changed: dict[str, Precision] = {
            name: "autocast" for name in decision.units if self._inherited(name, policy.default) != "autocast"
        }
        return policy.replace(modules=modules | changed)

    def with_precisions(self, policy: Policy, precisions: Mapping[str, Precision]) -> Policy:
        """Return the policy with rules by name alone, for the units whose precision they do not inherit."""
        kept = {name: choice for name, choice in policy.modules.items() if name in self.fp32_code}
        units = {name: precisions[name] for decision in self.decisions for name in decision.units}
        changed = {name: choice for name, choice in units.items() if choice != self._inherited(name, policy.default)}
        return policy.replace(modules=kept | changed)

    def owner_of(self, module: str) -> str | None:
        """Return the parameter that decides a module, itself or as a part of a unit; None where none does."""
        owners = {unit: decision.parameter for decision in self.free_decisions for unit in decision.units}
        while module and module not in owners:
            module = module.rpartition(".")[0]
        return owners.get(module)

    def key(self, policy: Policy) -> str:
        """Hash what makes two policies of this study different in effect."""
        chosen = {d.name: self._effective(d, policy) for d in self.decisions}
        return policy_key(policy, chosen)

    def _effective(self, decision: Decision, policy: Policy) -> str:
        choice = self.precision(policy, decision)
        return "autocast" if choice == policy.dtype and self.is_half_under_autocast(decision) else choice

    def is_half_under_autocast(self, decision: Decision) -> bool:
        """Whether autocast runs all of a decision in half, so that `autocast` and its dtype are one for it."""
        return matches_any(decision.lead_type, AUTOCAST_HALF_TYPES) and all(
            matches_any(kind, (*AUTOCAST_HALF_TYPES, *self.followers)) for kind in decision.units.values()
        )

    def _inherited(self, name: str, default: Precision) -> Precision:
        return "fp32" if any(name.startswith(f"{code}.") for code in self.fp32_code if code) else default

    def _grad_scaler(self, values: Mapping[str, Any]) -> GradScalerSettings | None:
        fields = GradScalerSettings.model_fields
        given = {f: values[f"grad_scaler/{f}"] for f in fields if f"grad_scaler/{f}" in values}
        settings = GradScalerSettings(**given)
        return None if settings == GradScalerSettings() else settings

    def _optimizer(self, values: Mapping[str, Any]) -> OptimizerSettings | None:
        changed = {n: values[n] for n in (EPS, AMSGRAD) if n in values and values[n] != self.defaults[n]}
        return OptimizerSettings(eps=changed.get(EPS), amsgrad=changed.get(AMSGRAD)) if changed else None


def policy_key(policy: Policy, chosen: Mapping[str, str] | None = None) -> str:
    """Hash a policy's effect: precisions, the dtype and scaler where they count, the optimizer's settings."""
    content = {
        "default": policy.default,
        "modules": dict(policy.modules) if chosen is None else dict(chosen),
        "dtype": policy.dtype if policy.low_precisions else None,
        "grad_scaler": policy.grad_scaler.model_dump() if policy.grad_scaler and policy.needs_grad_scaler else None,
        "optimizer": policy.optimizer.model_dump() if policy.optimizer else None,
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def build_parameters(
    decisions: Sequence[Decision],
    space: SearchSpace,
    *,
    optimizer_defaults: Mapping[str, Any],
    native_bf16: bool,
    dtype: StudyDtype = "fp16",
    fp32_code: Iterable[str] = (),
) -> Parameters:
    """Collect the parameters of a study.

    Args:
        decisions: from `build_decisions`.
        space: gives the ranges of scaler and optimizer.
        optimizer_defaults: `eps` and `amsgrad` of the task's optimizer; one that is absent leaves the study.
        native_bf16: whether the target has BF16 units, so that stock autocast in BF16 is a baseline.
        dtype: the study's; a BF16 study has no grad scaler and so no parameters of one.
        fp32_code: modules whose own code cannot run under autocast.

    Raises:
        UsageError: a range does not hold the default, which the baselines need.
    """
    scaler_defaults = {} if dtype == "bf16" else GradScalerSettings().model_dump()
    ranges: dict[str, tuple[Range | None, Any]] = {
        f"grad_scaler/{name}": (getattr(space.grad_scaler, name), value) for name, value in scaler_defaults.items()
    }
    for name in ("eps", "amsgrad"):
        if name in optimizer_defaults:
            ranges[f"optimizer/{name}"] = (getattr(space.optimizer, name), optimizer_defaults[name])
    distributions: dict[str, BaseDistribution] = {
        d.parameter: CategoricalDistribution(d.choices) for d in decisions if not d.is_pinned
    }
    defaults: dict[str, ParameterValue] = {}
    for name, (allowed, default) in ranges.items():
        if allowed is None or (allowed.choices is not None and len(allowed.choices) < 2):
            continue
        distributions[name] = _distribution(allowed, default)
        if not _holds(distributions[name], default):
            raise UsageError(f"search space {space.name}: {name}: does not hold the default {default}")
        defaults[name] = default
    if dtype == "both" or (dtype == "fp16" and native_bf16):
        distributions[AUTOCAST_DTYPE] = CategoricalDistribution(("fp16", "bf16"))
    if dtype == "fp16" and native_bf16:
        defaults[AUTOCAST_DTYPE] = "fp16"
    return Parameters(tuple(decisions), distributions, defaults, tuple(space.followers), frozenset(fp32_code), dtype)


def _distribution(allowed: Range, default: bool | int | float) -> BaseDistribution:
    if allowed.choices is not None:
        return CategoricalDistribution(tuple(type(default)(choice) for choice in allowed.choices))
    low, high = allowed.low or 0.0, allowed.high or 0.0
    if isinstance(default, int):
        return IntDistribution(round(low), round(high), log=allowed.log)
    return FloatDistribution(low, high, log=allowed.log)


def _draw(distribution: BaseDistribution, rng: np.random.Generator) -> ParameterValue:
    if isinstance(distribution, CategoricalDistribution):
        choice: ParameterValue = distribution.choices[int(rng.integers(len(distribution.choices)))]  # type: ignore[assignment]
        return choice
    assert isinstance(distribution, FloatDistribution | IntDistribution)
    low, high = float(distribution.low), float(distribution.high)
    value = math.exp(rng.uniform(math.log(low), math.log(high))) if distribution.log else rng.uniform(low, high)
    return round(value) if isinstance(distribution, IntDistribution) else min(max(value, low), high)


def _holds(distribution: BaseDistribution, value: ParameterValue) -> bool:
    if isinstance(distribution, CategoricalDistribution):
        return any(type(choice) is type(value) and choice == value for choice in distribution.choices)
    if isinstance(distribution, FloatDistribution | IntDistribution):
        return not isinstance(value, str) and distribution.low <= value <= distribution.high
    return False
