"""Whether a policy fits a model, and what a person should know before applying it. Changes nothing."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

from torch import nn

from autoprec.apply.install import apply_policy, remove_policy
from autoprec.apply.plan import named_as_here, resolve_plan
from autoprec.apply.portability import differences_from
from autoprec.apply.structure import Structure, read_structure, unwrap
from autoprec.errors import ApplyError, PrecisionWarning
from autoprec.policy import Policy, Precision, resolve_precisions

__all__ = ["PolicyFit", "check_fit"]


@dataclass(frozen=True, slots=True)
class PolicyFit:
    """What came of trying a policy on a model.

    Attributes:
        problem: why it cannot be applied; "" where it can.
        notes: what is allowed but differs: other shapes, rules without a module where others fit.
        differences: device and versions, as "torch 2.13.0 -> 2.14.1".
        uncovered: modules with parameters of their own that no rule reaches; they follow the default.
        unknown: modules with parameters that the model the policy was made for does not have.
        counts: precision -> modules with parameters that get it; empty where the policy does not fit.
    """

    problem: str
    notes: tuple[str, ...]
    differences: tuple[str, ...]
    uncovered: tuple[str, ...]
    unknown: tuple[str, ...]
    counts: dict[Precision, int]

    @property
    def fits(self) -> bool:
        return not self.problem


def check_fit(model: nn.Module, policy: Policy) -> PolicyFit:
    """Try `policy` on a bare model: it is applied and removed again; nothing is run."""
    structure = read_structure(model)
    policy = named_as_here(structure, policy)
    problem, notes = _try(model, policy)
    names = [name for name, module in structure.unique() if name and module._parameters]
    known = set(policy.model.modules) if policy.model is not None else set()
    return PolicyFit(
        problem=problem,
        notes=tuple(notes),
        differences=tuple(differences_from(policy, unwrap(model))),
        uncovered=tuple(_without_rule(structure, policy, names)),
        unknown=tuple(name for name in names if known and name not in known and name not in structure.governors),
        counts={} if problem else _counts(structure, policy, names),
    )


def _try(model: nn.Module, policy: Policy) -> tuple[str, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", PrecisionWarning)
        try:
            apply_policy(model, policy.replace(provenance=None))
        except ApplyError as error:
            return str(error), []
        remove_policy(model)
    return "", [str(warning.message) for warning in caught if issubclass(warning.category, PrecisionWarning)]


def _without_rule(structure: Structure, policy: Policy, names: list[str]) -> list[str]:
    _, rules = resolve_precisions(policy, structure.parents)
    return [name for name in names if policy.modules and rules[structure.governors.get(name, name)] is None]


def _counts(structure: Structure, policy: Policy, names: list[str]) -> dict[Precision, int]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PrecisionWarning)
        plan = resolve_plan(structure, policy)
    counts: dict[Precision, int] = {}
    for name in names:
        counts[plan.precision(name)] = counts.get(plan.precision(name), 0) + 1
    return counts
