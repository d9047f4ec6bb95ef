"""What is known of a model's units before the first trial: plain data that a profile, or a person, gives a sampler."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["CostPrior", "PolicyPrior"]

UnitChoice = tuple[str, str]
"""A parameter's name and one of its choices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostPrior:
    """Expected changes of one quantity, relative to where every unit takes its safe choice.

    Attributes:
        units: (parameter, choice) -> change, as a share of the quantity with all units safe (-0.01 is 1 % less). What
            is absent is 0.
        borders: (parameter, parameter) -> change where the two hand on different dtypes, in the same terms.
        relative_error: how far a single entry may be off, as a share of its size.
        scale_error: how far all of them may be off together.
    """

    units: Mapping[UnitChoice, float] = field(default_factory=dict)
    borders: Mapping[tuple[str, str], float] = field(default_factory=dict)
    relative_error: float = 0.4
    scale_error: float = 0.4


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyPrior:
    """Everything that a sampler may know beforehand.

    Attributes:
        order: the parameters in call order; what the study has besides comes after them. Empty: the study's own order.
        borders: pairs of parameters between whose units values flow, where that is no chain; empty takes neighbours in
            the order.
        costs: objective number -> its prior.
        constraints: constraint name -> its prior, relative to its distance from the limit with all units safe: changes
            that add up to 1 use the whole distance.
        failures: (parameter, choice) -> probability that this choice alone makes a training fail.
        pinned: parameter -> the only choice to propose for it.
        equal: (parameter, choice) -> the choice of the same parameter that it equals in effect.
        flows: (parameter, choice) -> the dtype of what the unit then hands on; a border costs where two differ. What is
            absent hands on its own kind.
    """

    order: tuple[str, ...] = ()
    borders: tuple[tuple[str, str], ...] = ()
    costs: Mapping[int, CostPrior] = field(default_factory=dict)
    constraints: Mapping[str, CostPrior] = field(default_factory=dict)
    failures: Mapping[UnitChoice, float] = field(default_factory=dict)
    pinned: Mapping[str, str] = field(default_factory=dict)
    equal: Mapping[UnitChoice, str] = field(default_factory=dict)
    flows: Mapping[UnitChoice, str] = field(default_factory=dict)
