"""What a study's trials say about its decisions, as numbers: all that `PolicySampler` knows is read from here."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from autoprec.search.cost_model import Encoding
from autoprec.search.failures import Verdict
from autoprec.search.prior import PolicyPrior

__all__ = ["CACHED_FROM", "FAILED_UNIT", "FINITE", "TrialHistory", "encode_decisions", "read_history", "Quantity"]

FAILED_UNIT = "failed_unit"
"""User attribute of a trial: the parameter whose unit was the first to be non-finite."""
CACHED_FROM = "cached_from"
"""User attribute of a trial: the number of the trial with an equal policy from which its result was taken."""
FINITE = "finite"
"""Constraint that says, where it is broken, that the training failed outright and its objective values mean nothing."""


@dataclass(frozen=True, slots=True)
class Quantity:
    """One objective or constraint over the trials that did not fail, relative to all units safe.

    Attributes:
        values: 0 at the reference; an objective's are smaller where it is better, a constraint's reach `limit` where
            it breaks.
        trials: which of the history's `chosen` they belong to: a trial that was ended early has no objectives.
        limit: None for an objective.
        is_cost: whether it is a cost by nature, such as memory and time, which low precision is expected to cut.
    """

    values: NDArray[np.float64]
    trials: NDArray[np.intp]
    limit: float | None = None
    is_cost: bool = True


@dataclass(frozen=True, slots=True)
class TrialHistory:
    """Attributes:
    chosen: policies of the trials that give numbers, constraints at least, (trials, units).
    objectives, constraints: their numbers.
    feasible: whether each broke no constraint.
    verdicts: what every trial that was run says about failures, in order.
    seen: every policy that was asked for, running ones included.
    has_reference: whether all units safe was asked for.
    """

    chosen: NDArray[np.intp]
    objectives: Sequence[Quantity]
    constraints: Mapping[str, Quantity]
    feasible: NDArray[np.bool_]
    verdicts: Sequence[Verdict]
    seen: frozenset[tuple[int, ...]]
    has_reference: bool


def encode_decisions(
    space: Mapping[str, BaseDistribution], trials: Sequence[FrozenTrial], prior: PolicyPrior, *, safe_choice: str
) -> Encoding:
    """Take the parameters of `space` that are decisions: categorical with `safe_choice` and something else.

    They stand in the prior's order, then in the order in which the first trial suggested them. A choice that equals
    another in effect, as the prior says or a trial answered from an equal one shows, is left out.
    """
    suggested = list(next((trial.distributions for trial in trials if trial.distributions), {}))
    ranks = {name: place for place, name in enumerate(dict.fromkeys([*prior.order, *suggested, *space]))}
    names = [name for name in sorted(space, key=ranks.__getitem__) if _is_decision(space[name], safe_choice)]
    equal = {**_equal_choices(trials, safe_choice), **prior.equal}
    choices = tuple(
        tuple(choice for choice in _choices(space[name]) if equal.get((name, str(choice)), choice) == choice)
        for name in names
    )
    places = {name: place for place, name in enumerate(names)}
    pairs = prior.borders or list(itertools.pairwise(names))
    known = {(places[a], places[b]) for a, b in pairs if a in places and b in places and a != b}
    borders = tuple(sorted({(min(pair), max(pair)) for pair in known}))
    return Encoding(
        tuple(names), choices, tuple(own.index(safe_choice) for own in choices), borders, equal, prior.flows
    )


def read_history(
    encoding: Encoding,
    trials: Sequence[FrozenTrial],
    directions: Sequence[StudyDirection],
    *,
    reciprocal: Sequence[int],
    ignore_failed: bool,
    same: Mapping[str, Any],
    scaler: Mapping[str, Any] | None = None,
    family: tuple[str, Any] | None = None,
) -> TrialHistory:
    """Read the trials of a study; one that lacks a decision, or has another choice for it, is left out.

    Trials whose other parameters are not those of `same` say nothing about precisions: they only count as asked for.
    Those with other values than `scaler` say nothing about constraints, all units safe excepted: what broke one counts
    as not asked for. Those with another value of the parameter `family` only teach what policies cost.
    """
    seen: set[tuple[int, ...]] = set()
    verdicts: list[Verdict] = []
    numbers: list[FrozenTrial] = []
    chosen: list[tuple[int, ...]] = []
    constrained: list[FrozenTrial] = []
    foreign: list[bool] = []
    for trial in trials:
        row = encoding.numbers(trial.params)
        if row is None or (trial.state == TrialState.FAIL and ignore_failed):
            continue
        is_foreign = family is not None and row != encoding.safe and trial.params.get(family[0]) != family[1]
        is_other = is_foreign or (row != encoding.safe and _differs(trial, scaler or {}))
        if not is_foreign and not (is_other and any(value > 0 for value in trial.constraints.values())):
            seen.add(row)
        if not trial.state.is_finished() or CACHED_FROM in trial.user_attrs:
            continue
        if _differs(trial, same):
            continue
        failed = _has_failed(trial)
        if not is_foreign:
            verdicts.append(Verdict(row, failed, _named(encoding, trial)))
        if not failed and (trial.values is not None or any(name != FINITE for name in trial.constraints)):
            numbers.append(trial)
            chosen.append(row)
            constrained += [] if is_other else [trial]
            foreign.append(is_foreign)
    reference = next((t for t, row in zip(numbers, chosen, strict=True) if row == encoding.safe and t.values), None)
    return TrialHistory(
        chosen=np.array(chosen, dtype=np.intp).reshape(len(chosen), len(encoding.parameters)),
        objectives=[
            _objective(numbers, reference, k, direction, reciprocal=k in reciprocal)
            for k, direction in enumerate(directions)
        ],
        constraints=_constraints(numbers, constrained, reference),
        feasible=np.array(
            [
                bool(t.values) and all(v <= 0 for v in t.constraints.values()) and not other
                for t, other in zip(numbers, foreign, strict=True)
            ],
            dtype=bool,
        ),
        verdicts=verdicts,
        seen=frozenset(seen),
        has_reference=tuple(encoding.safe) in seen,
    )


def _differs(trial: FrozenTrial, wanted: Mapping[str, Any]) -> bool:
    return any(trial.params.get(name, value) != value for name, value in wanted.items())


def _is_decision(distribution: BaseDistribution, safe_choice: str) -> bool:
    choices = _choices(distribution)
    return len(choices) > 1 and any(isinstance(choice, str) and choice == safe_choice for choice in choices)


def _choices(distribution: BaseDistribution) -> tuple[Any, ...]:
    return tuple(distribution.choices) if isinstance(distribution, CategoricalDistribution) else ()


def _equal_choices(trials: Sequence[FrozenTrial], safe_choice: str) -> dict[tuple[str, str], Any]:
    """Learn from trials answered by an equal one that differed in a single parameter: its two choices are one."""
    by_number = {trial.number: trial for trial in trials}
    equal: dict[tuple[str, str], Any] = {}
    for trial in trials:
        other = by_number.get(trial.user_attrs.get(CACHED_FROM, -1))
        if other is None or set(other.params) != set(trial.params):
            continue
        differing = [name for name, value in trial.params.items() if other.params[name] != value]
        if len(differing) == 1 and (differing[0], str(other.params[differing[0]])) not in equal:
            name = differing[0]
            first, second = other.params[name], trial.params[name]
            if second == safe_choice:
                first, second = second, first
            equal[name, str(second)] = first
    return equal


def _has_failed(trial: FrozenTrial) -> bool:
    if trial.constraints.get(FINITE, -1.0) > 0 or FAILED_UNIT in trial.user_attrs:
        return True
    if trial.state in (TrialState.FAIL, TrialState.PRUNED):
        return trial.constraints.get(FINITE) is None
    return trial.values is None or not all(math.isfinite(value) for value in trial.values)


def _named(encoding: Encoding, trial: FrozenTrial) -> int | None:
    name = trial.user_attrs.get(FAILED_UNIT)
    return encoding.parameters.index(name) if name in encoding.parameters else None


def _objective(
    trials: Sequence[FrozenTrial],
    reference: FrozenTrial | None,
    number: int,
    direction: StudyDirection,
    *,
    reciprocal: bool,
) -> Quantity:
    known = np.array([place for place, trial in enumerate(trials) if trial.values], dtype=np.intp)
    raw = np.array([trials[place].values[number] for place in known], dtype=np.float64)
    if reciprocal and (raw > 0).all():
        raw, direction = 1.0 / np.maximum(raw, 1e-300), StudyDirection.MINIMIZE
        start = None if reference is None else 1.0 / reference.values[number]
    else:
        start = None if reference is None else float(reference.values[number])
    is_cost = direction == StudyDirection.MINIMIZE
    if not len(raw):
        return Quantity(raw, known, is_cost=is_cost)
    start = float(np.median(raw)) if start is None else start
    scale = abs(start) or float(np.std(raw)) or 1.0
    sign = -1.0 if direction == StudyDirection.MAXIMIZE else 1.0
    return Quantity(sign * (raw - start) / scale, known, is_cost=is_cost)


def _constraints(
    trials: Sequence[FrozenTrial], told: Sequence[FrozenTrial], reference: FrozenTrial | None
) -> dict[str, Quantity]:
    """Return the constraints that all complete trials have, as `told`, some of `trials`, knows them."""
    numbers = {trial.number for trial in told}
    names = dict.fromkeys(name for trial in told for name in trial.constraints if name != FINITE)
    found: dict[str, Quantity] = {}
    for name in names:
        if any(trial.values and name not in trial.constraints for trial in told):
            continue
        places = [p for p, trial in enumerate(trials) if trial.number in numbers and name in trial.constraints]
        known = np.array(places, dtype=np.intp)
        raw = np.array([trials[place].constraints[name] for place in known], dtype=np.float64)
        start = float(np.median(raw)) if reference is None else float(reference.constraints[name])
        scale = -start if start < 0 else float(np.std(raw)) or 1.0
        found[name] = Quantity((raw - start) / scale, known, limit=-start / scale)
    return found
