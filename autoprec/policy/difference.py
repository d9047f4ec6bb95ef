"""What differs between two policies: units, settings, numbers. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from autoprec.policy.evidence import GradScalerSettings, Number, OptimizerSettings, Precision, TrainingOptions
from autoprec.policy.precedence import is_glob, parents_of, resolve_precisions
from autoprec.policy.values import Policy

__all__ = ["PolicyDifference", "compare_policies", "known_precisions"]

NUMBERS = ("peak_memory_bytes", "throughput_samples_per_second", "throughput_tokens_per_second", "accuracy")


@dataclass(frozen=True, slots=True)
class PolicyDifference:
    """What differs; every pair is (first, second), None where one of the two has nothing there.

    Attributes:
        rules: rule -> precisions, where neither policy knows the modules of a model, and always for globs.
        units: module -> precisions; `layer4` alone stands for all below it where all of them changed alike.
        num_units: module (or all below it) -> how many units that is.
        settings: "grad_scaler.init_scale" -> values; also `default`, `dtype`, `model` and what it was found on.
        numbers: field of the policy's own arm in the evidence -> numbers.
    """

    rules: Mapping[str, tuple[Precision | None, Precision | None]]
    units: Mapping[str, tuple[Precision | None, Precision | None]]
    num_units: Mapping[str, int]
    settings: Mapping[str, tuple[Any, Any]]
    numbers: Mapping[str, tuple[Number | None, Number | None]]

    @property
    def is_empty(self) -> bool:
        return not (self.rules or self.units or self.settings or self.numbers)


def compare_policies(first: Policy, second: Policy) -> PolicyDifference:
    """Compare what two policies say and what stands behind them.

    Units are compared by the precision that the rules give them, not by how the rules are written.
    """
    names = {name: None for policy in (first, second) for name in _module_names(policy)}
    before, after = (_precisions(policy, names) for policy in (first, second))
    pairs = {name: (before.get(name), after.get(name)) for name in names}
    units = _collapsed(pairs)
    globs = [rule for policy in (first, second) for rule in policy.modules if is_glob(rule)]
    rules = {rule: (first.modules.get(rule), second.modules.get(rule)) for rule in globs}
    no_models = first.model is None or second.model is None
    return PolicyDifference(
        rules={rule: pair for rule, pair in rules.items() if no_models and pair[0] != pair[1]},
        units={name: pair for name, (pair, _) in units.items()},
        num_units={name: count for name, (_, count) in units.items()},
        settings=_settings(first, second),
        numbers=_numbers(first, second),
    )


def known_precisions(policy: Policy) -> dict[str, tuple[Precision, str | None]]:
    """Return the precision of each module that the policy knows by name, and the rule that decides (None: default)."""
    names = list(_module_names(policy))
    by_name, rules = resolve_precisions(policy, parents_of(names))
    return {name: (by_name[name], rules[name]) for name in names}


def _module_names(policy: Policy) -> Iterable[str]:
    """The modules of the model that the policy was made for; without one, what its rules and evidence name."""
    if policy.model is not None and policy.model.modules:
        return policy.model.modules
    units = policy.evidence.units if policy.evidence is not None else {}
    return dict.fromkeys([*units, *(rule for rule in policy.modules if not is_glob(rule))])


def _precisions(policy: Policy, names: Iterable[str]) -> dict[str, Precision]:
    """Resolve all names; those that a model of the policy's own does not have are left out."""
    has_model = policy.model is not None and policy.model.modules
    own = set(_module_names(policy)) if has_model else set(names)
    by_name, _ = resolve_precisions(policy, parents_of(own))
    return {name: by_name[name] for name in own}


def _collapsed(pairs: Mapping[str, tuple[Any, Any]]) -> dict[str, tuple[tuple[Any, Any], int]]:
    """Keep the pairs that differ; a module stands for all below it where they have one pair, else for itself."""
    below: dict[str, list[tuple[Any, Any]]] = {}
    for name, pair in pairs.items():
        for above in _with_parents(name):
            below.setdefault(above, []).append(pair)
    uniform = {above for above, found in below.items() if len(set(found)) == 1}
    kept: dict[str, tuple[tuple[Any, Any], int]] = {}
    for name, pair in pairs.items():
        if pair[0] != pair[1]:
            top = next((above for above in _with_parents(name) if above in uniform), None)
            kept[top or name] = (pair, 1 if top is None else len(below[top]))
    return kept


def _with_parents(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[: count + 1]) for count in range(len(parts))]


def _settings(first: Policy, second: Policy) -> dict[str, tuple[Any, Any]]:
    one, other = _flat_settings(first), _flat_settings(second)
    pairs = {key: (one.get(key), other.get(key)) for key in {**one, **other}}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def _flat_settings(policy: Policy) -> dict[str, Any]:
    """Every setting by its path; what is not said has torch's default, except where no scaler is needed."""
    flat: dict[str, Any] = {"default": policy.default, "dtype": policy.dtype}
    scaler = policy.grad_scaler or GradScalerSettings()
    parts: dict[str, Any] = {
        "grad_scaler": scaler if policy.needs_grad_scaler else None,
        "optimizer": policy.optimizer or OptimizerSettings(),
        "training": policy.training or TrainingOptions(),
    }
    for name, part in parts.items():
        flat |= {} if part is None else {f"{name}.{key}": value for key, value in part}
    if policy.model is not None:
        flat |= {"model.name": policy.model.name, "model.fingerprint": policy.model.fingerprint}
    if policy.recommendation is not None:
        flat["recommendation.choice"] = policy.recommendation.choice
    found = policy.provenance
    if found is not None:
        flat |= {f"provenance.{key}": getattr(found, key) for key in ("device_name", "target_gpu", "task")}
        flat |= {f"provenance.versions.{key}": value for key, value in found.versions.items()}
    return flat


def _numbers(first: Policy, second: Policy) -> dict[str, tuple[Number | None, Number | None]]:
    def own(policy: Policy, field: str) -> Number | None:
        arm = policy.evidence.arms.get(policy.evidence.arm) if policy.evidence is not None else None
        number: Number | None = getattr(arm, field, None)
        return number

    pairs = {field: (own(first, field), own(second, field)) for field in NUMBERS}
    return {field: pair for field, pair in pairs.items() if pair[0] != pair[1]}
