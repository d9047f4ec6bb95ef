"""From a profile to what the search does with it: the sampler's prior, pinned decisions, scaler settings, evidence."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from scipy.special import ndtr  # type: ignore[import-untyped]

from autoprec.policy import LowPrecision, Number, Precision
from autoprec.profiling.profile import Profile
from autoprec.profiling.scaler_choice import choose_scaler
from autoprec.search.decision import Decision
from autoprec.search.parameters import Parameters, ParameterValue
from autoprec.search.prior import CostPrior, PolicyPrior
from autoprec.search.space import Choice, matches_any

__all__ = ["Lessons", "learn_from_profile", "plain_lessons", "plain_prior", "unit_figures"]

FP32_UNDER_AUTOCAST = ("LayerNorm", "RMSNorm", "GroupNorm", "InstanceNorm*", "LocalResponseNorm", "*Softmax*", "*Loss")
"""Classes that CUDA's autocast runs in FP32, so that they hand on FP32 and cannot overflow."""
HEADROOM_ERROR_OCTAVES = 1.2
"""How far the range of a few steps may lie from that of a training, one standard deviation."""
PIN_OUTPUT_ERROR = 0.1
"""Relative error of a unit's output in half, as a share of its size, from which on it may be pinned to FP32: all but
the first three bits are lost."""
PIN_SCORE = 1e-3
"""The expected relative change of the loss that a unit so pinned must have besides: what nobody reads may be wrong."""
PIN_OCTAVES = -0.5
"""A unit whose activations exceed FP16's largest by this much is pinned to FP32 without a trial."""
NOTHING = 2e-4
"""A unit that saves less than this share of time and of memory is not worth a decision: it stays under autocast."""
MEMORY_ERROR, TIME_ERROR, SCORE_ERROR = 0.3, 0.4, 1.0
"""Relative errors of the profile's figures: what is alive at the peak depends on the whole policy; a roofline's ratio
(docs/estimates.md); an error score tells the order of magnitude."""


@dataclass(frozen=True, slots=True)
class Lessons:
    """What a profile taught.

    Attributes:
        prior: for the sampler; its `pinned` are the decisions that are not searched, in no family.
        families: dtype of `autocast` -> the prior of the policies that have it.
        fixed: the scaler's parameters -> their value.
        reasons: decision name -> why it is not searched.
        profile: where all that comes from; None where none was taken.
    """

    prior: PolicyPrior = field(default_factory=PolicyPrior)
    families: Mapping[str, PolicyPrior] = field(default_factory=dict)
    fixed: Mapping[str, ParameterValue] = field(default_factory=dict)
    reasons: Mapping[str, str] = field(default_factory=dict)
    profile: Profile | None = None


def plain_lessons(parameters: Parameters, unit_calls: Sequence[str]) -> Lessons:
    """Return what is known without a profile."""
    plain = plain_prior(parameters, unit_calls)
    return Lessons(plain, dict.fromkeys(parameters.families, plain))


def plain_prior(parameters: Parameters, unit_calls: Sequence[str]) -> PolicyPrior:
    """Return what is known without a profile: call order, borders, dtypes handed on, choices that are the same."""
    free = parameters.free_decisions
    pairs = _border_units(free, unit_calls)
    dtype = parameters.families[0]
    return PolicyPrior(
        order=tuple(decision.parameter for decision in free),
        borders=tuple(pairs),
        equal={(d.parameter, parameters.half): "autocast" for d in free if _is_same(parameters, d)},
        flows={(d.parameter, choice): _low(d, choice, dtype) or "fp32" for d in free for choice in d.choices},
    )


def learn_from_profile(
    profile: Profile, parameters: Parameters, unit_calls: Sequence[str], *, max_loss_gap: float
) -> Lessons:
    """Turn a profile into the sampler's prior, the decisions that need no search, and the scaler's settings."""
    plain = plain_prior(parameters, unit_calls)
    free = parameters.free_decisions
    costs = _costs(profile, free, _border_units(free, unit_calls))
    pins = {dtype: {d.name: pin for d in free if (pin := _pin(profile, d, dtype))} for dtype in parameters.families}
    families: dict[str, PolicyPrior] = {}
    for dtype, own in pins.items():
        families[dtype] = replace(
            plain,
            pinned={d.parameter: own[d.name][0] for d in free if d.name in own},
            costs=costs,
            constraints={"loss_gap": _loss_prior(profile, free, dtype, max_loss_gap)},
            failures={
                (d.parameter, choice): _failure_probability(profile, d, choice, dtype)
                for d in free
                for choice in d.choices
            },
        )
    first = parameters.families[0]
    common = {n: pin for n, pin in pins[first].items() if all(own.get(n, ("",))[0] == pin[0] for own in pins.values())}
    pinned = {d.parameter: common[d.name][0] for d in free if d.name in common}
    prior = replace(families[first], pinned=pinned)
    reasons = {name: reason for name, (_, reason) in common.items()}
    return Lessons(prior, families, _scaler_values(profile, parameters), reasons, profile)


def _low(decision: Decision, choice: str, dtype: LowPrecision) -> LowPrecision | None:
    """Return the dtype that a choice computes in and hands on, where `autocast` is of `dtype`; None for FP32."""
    if choice == "fp32" or (choice == "autocast" and matches_any(decision.lead_type, FP32_UNDER_AUTOCAST)):
        return None
    named: dict[str, LowPrecision] = {"fp16": "fp16", "bf16": "bf16"}
    return named.get(choice, dtype)


def _is_same(parameters: Parameters, decision: Decision) -> bool:
    return {"autocast", parameters.half} <= set(decision.choices) and parameters.is_half_under_autocast(decision)


def _border_units(decisions: Sequence[Decision], calls: Sequence[str]) -> dict[tuple[str, str], list[str]]:
    """Return the borders between decisions along the calls, with the units whose output crosses each."""
    owner = {unit: decision.parameter for decision in decisions for unit in decision.units}
    owned = [(owner[name], name) for name in calls if name in owner]
    crossing: dict[tuple[str, str], list[str]] = {}
    for (first, unit), (second, _) in itertools.pairwise(owned):
        if first != second:
            crossing.setdefault(tuple(sorted((first, second))), []).append(unit)  # type: ignore[arg-type]
    return crossing


def _costs(
    profile: Profile, decisions: Sequence[Decision], borders: Mapping[tuple[str, str], Sequence[str]]
) -> dict[int, CostPrior]:
    seconds, peak = profile.step_seconds.get("fp32", 0.0), profile.peak_bytes.get("fp32", 0.0)
    if seconds <= 0 or peak <= 0:
        return {}
    memory, time = {}, {}
    for decision, choice in ((d, c) for d in decisions for c in d.choices if c != "fp32"):
        saved = _saved(profile, decision, choice)
        memory[decision.parameter, str(choice)] = -saved[1] / peak
        time[decision.parameter, str(choice)] = -saved[0] / seconds
    casts = {
        pair: math.fsum(profile.units[u].cast_seconds for u in units if u in profile.units) / seconds
        for pair, units in borders.items()
    }
    return {
        0: CostPrior(units=memory, relative_error=MEMORY_ERROR),
        1: CostPrior(units=time, borders=casts, relative_error=TIME_ERROR),
    }


def _saved(profile: Profile, decision: Decision, choice: Choice) -> tuple[float, float]:
    """Return the seconds and peak bytes that a decision saves against FP32; BF16 counts as FP16."""
    name: Precision = "autocast" if choice == "autocast" else "fp16"
    seconds = peak = 0.0
    for unit in decision.units:
        costs = profile.units[unit].costs if unit in profile.units else {}
        if "fp32" in costs and name in costs:
            seconds += costs["fp32"].seconds - costs[name].seconds
            peak += costs["fp32"].peak_bytes - costs[name].peak_bytes
    return seconds, peak


def _loss_prior(profile: Profile, decisions: Sequence[Decision], dtype: LowPrecision, max_loss_gap: float) -> CostPrior:
    """Errors of units that share a decision add up as independent ones do."""
    used: dict[tuple[str, str], float] = {}
    for decision, choice in ((d, c) for d in decisions for c in d.choices):
        low = _low(decision, choice, dtype)
        if low is not None:
            scores = [profile.units[unit].error_score(low) for unit in decision.units if unit in profile.units]
            share = math.sqrt(math.fsum(score**2 for score in scores)) / max_loss_gap
            used[decision.parameter, str(choice)] = min(1.0, share)
    return CostPrior(units=used, relative_error=SCORE_ERROR, scale_error=SCORE_ERROR)


def _failure_probability(profile: Profile, decision: Decision, choice: Choice, dtype: LowPrecision) -> float:
    if _low(decision, choice, dtype) != "fp16":
        return 0.001
    seen = [profile.units[unit] for unit in decision.units if unit in profile.units]
    if any(unit.overflows for unit in seen):
        return 0.97
    rooms = [unit.headroom_octaves for unit in seen if unit.headroom_octaves is not None]
    survives = math.prod(1.0 - float(ndtr(-room / HEADROOM_ERROR_OCTAVES)) for room in rooms)
    return min(0.97, max(0.002, 1.0 - survives))


def _pin(profile: Profile, decision: Decision, dtype: LowPrecision) -> tuple[Precision, str] | None:
    """Return the precision of a decision that needs no search, and why; None where it is to be searched."""
    seen = {unit: profile.units[unit] for unit in decision.units if unit in profile.units}
    lows = {_low(decision, choice, dtype) for choice in decision.choices} - {None}
    over = [u for u, p in seen.items() if p.headroom_octaves is not None and p.headroom_octaves <= PIN_OCTAVES]
    if over and dtype == "fp16":
        unit = max(over, key=lambda name: seen[name].activations.maximum)
        return (
            "fp32",
            f"overflows FP16: activations of {unit} reach {seen[unit].activations.maximum:.3g} in the profile",
        )
    if lows == {dtype}:
        errors = {unit: p.half[dtype] for unit, p in seen.items() if dtype in p.half}
        lost = [
            u for u, e in errors.items() if e.output >= PIN_OUTPUT_ERROR and seen[u].error_score(dtype) >= PIN_SCORE
        ]
        if lost:
            unit = max(lost, key=lambda name: errors[name].output)
            verb = "rounds" if dtype == "bf16" else "loses its values"
            return (
                "fp32",
                f"{verb} in {dtype.upper()}: the output of {unit} is off by {errors[unit].output:.0%} in the profile",
            )
    seconds, peak = profile.step_seconds.get("fp32", 0.0), profile.peak_bytes.get("fp32", 0.0)
    if seconds <= 0 or peak <= 0 or not all({"fp32", "autocast"} <= set(p.costs) for p in seen.values()) or not seen:
        return None
    saved = [_saved(profile, decision, choice) for choice in decision.choices if choice != "fp32"]
    if all(abs(s) < NOTHING * seconds and abs(b) < NOTHING * peak for s, b in saved):
        return "autocast", f"half brings nothing: less than {NOTHING:.2%} of time and of memory in any precision"
    return None


def _scaler_values(profile: Profile, parameters: Parameters) -> dict[str, ParameterValue]:
    choices = {
        name.partition("/")[2]: _offered(distribution)
        for name, distribution in parameters.distributions.items()
        if name.startswith("grad_scaler/")
    }
    if not choices or not any(unit.activation_gradients.num_values for unit in profile.units.values()):
        return {}
    if "growth_interval" in choices:
        whole: Sequence[float] = [int(value) for value in choices["growth_interval"]]
        choices["growth_interval"] = list(whole)
    settings = choose_scaler(profile, choices)
    return {f"grad_scaler/{name}": getattr(settings, name) for name in choices}


def _offered(distribution: BaseDistribution) -> list[float]:
    """Return the choices of a scaler's setting; of a range its powers of two, or a few values where it has no scale."""
    if isinstance(distribution, CategoricalDistribution):
        return [float(choice) for choice in distribution.choices]  # type: ignore[arg-type]
    assert isinstance(distribution, FloatDistribution | IntDistribution)
    low, high = float(distribution.low), float(distribution.high)
    if distribution.log:
        return [2.0**octave for octave in range(math.ceil(math.log2(low)), math.floor(math.log2(high)) + 1)] or [low]
    return [low, (low + high) / 2, high]


def unit_figures(
    profile: Profile, name: str, precision: Precision, scale: float, dtype: LowPrecision = "fp16"
) -> dict[str, Any]:
    """Return the evidence that a profile has for one unit in one precision, as fields of `UnitEvidence`.

    `dtype` is what `autocast` has in the policy; in BF16 there is no headroom and nothing is flushed.
    """
    dtype = precision if precision in ("fp16", "bf16") else dtype
    unit = profile.units.get(name)
    if unit is None:
        return {}
    figures: dict[str, Any] = {
        "error_score": unit.error_score(dtype),
    }
    if dtype == "fp16":
        figures |= {"headroom_octaves": unit.headroom_octaves, "flushed_share": unit.flushed_share(scale)}
    known: Precision = "fp16" if precision == "bf16" else precision
    if {"fp32", known} <= set(unit.costs):
        before, after = unit.costs["fp32"], unit.costs[known]
        figures["saved_bytes"] = Number(value=before.peak_bytes - after.peak_bytes, kind="computed")
        figures["saved_seconds"] = Number(value=before.seconds - after.seconds, kind="predicted")
    return figures
