"""An additive model of one measured quantity: a cost of each unit's choice and of each border, learned from trials."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autoprec.search.prior import CostPrior
from autoprec.search.solver import Border

__all__ = ["Encoding", "CostModel", "Coefficients", "fit_costs"]

Array = NDArray[np.float64]

NOISES = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
DEVIATIONS = (0.25, 1.0, 4.0)
"""Tried values of the measurement's noise (a share of the spread of what was measured) and of a factor on the prior's
own errors; what the trials make most likely is taken."""
NO_PROFILE_SPREAD = 0.4
"""Without a profile: what all units changed together may add to the expected change, as a share of the quantity."""


@dataclass(frozen=True)
class Encoding:
    """How policies become rows of numbers: a column for each unit's choice but the safe one, and for each border.

    Attributes:
        choices: for each unit its choices.
        safe: for each unit the number of its safe choice.
        borders: pairs of unit numbers.
        equal: (parameter, choice) -> the choice that it equals in effect and that stands for it.
        flows: (parameter, choice) -> the dtype that the unit then hands on; by default the choice itself.
    """

    parameters: tuple[str, ...]
    choices: tuple[tuple[Any, ...], ...]
    safe: tuple[int, ...]
    borders: tuple[Border, ...]
    equal: Mapping[tuple[str, str], Any] = field(default_factory=dict)
    flows: Mapping[tuple[str, str], str] = field(default_factory=dict)

    @cached_property
    def sizes(self) -> list[int]:
        return [len(choices) for choices in self.choices]

    @cached_property
    def unit_columns(self) -> list[tuple[int, int]]:
        """(unit, choice) of each of the first columns."""
        return [(u, c) for u, size in enumerate(self.sizes) for c in range(size) if c != self.safe[u]]

    @cached_property
    def casts(self) -> dict[Border, NDArray[np.bool_]]:
        """For each border, whether values are cast at it, by the two choices."""
        kinds = [self._kinds[unit, :size] for unit, size in enumerate(self.sizes)]
        return {(a, b): kinds[a][:, None] != kinds[b][None, :] for a, b in self.borders}

    def numbers(self, params: Mapping[str, Any]) -> tuple[int, ...] | None:
        """Return the choice numbers of a trial's parameters; None where one is absent or has another choice."""
        try:
            values = [self.equal.get((name, str(params[name])), params[name]) for name in self.parameters]
            return tuple(own.index(value) for own, value in zip(self.choices, values, strict=True))
        except (KeyError, ValueError):
            return None

    def values(self, chosen: Sequence[int]) -> dict[str, Any]:
        """Return the parameters that choice numbers stand for."""
        return {n: own[int(c)] for n, own, c in zip(self.parameters, self.choices, chosen, strict=True)}

    def rows(self, chosen: NDArray[np.intp]) -> Array:
        """Encode policies (count, units) as (count, columns): the unit columns, then a column a border."""
        units, choices = np.array(self.unit_columns, dtype=np.intp).reshape(-1, 2).T
        first, second = np.array(self.borders, dtype=np.intp).reshape(-1, 2).T
        kinds = self._kinds[np.arange(len(self.choices)), chosen]
        columns = [chosen[:, units] == choices, kinds[:, first] != kinds[:, second]]
        return np.asarray(np.concatenate(columns, axis=1), dtype=np.float64)

    @cached_property
    def _kinds(self) -> NDArray[np.intp]:
        """A number for the dtype that each choice of each unit hands on, (units, most choices of a unit)."""
        numbers: dict[str, int] = {}
        table = np.zeros((len(self.choices), max(self.sizes, default=0)), dtype=np.intp)
        for unit, own in enumerate(self.choices):
            for place, choice in enumerate(own):
                kind = self.flows.get((self.parameters[unit], str(choice)), str(choice))
                table[unit, place] = numbers.setdefault(kind, len(numbers))
        return table


@dataclass(frozen=True, slots=True)
class Coefficients:
    """One value for each column, in the shape that the solver takes."""

    values: Array
    """(draws, columns)."""

    def unit_costs(self, encoding: Encoding) -> list[Array]:
        """Return for each unit its costs, (draws, choices)."""
        costs = [np.zeros((len(self.values), size)) for size in encoding.sizes]
        for column, (unit, choice) in enumerate(encoding.unit_columns):
            costs[unit][:, choice] = self.values[:, column]
        return costs

    def border_costs(self, encoding: Encoding) -> dict[Border, Array]:
        """Return for each border its costs, (draws, choices, choices)."""
        start = len(encoding.unit_columns)
        return {
            pair: self.values[:, start + index, None, None] * encoding.casts[pair]
            for index, pair in enumerate(encoding.borders)
        }


@dataclass(frozen=True, slots=True)
class _Prior:
    """coefficients = groups @ a + d, with a ~ N(means, spreads^2) and d ~ N(0, deviations^2); columns x groups."""

    groups: Array
    means: Array
    spreads: Array
    deviations: Array


class CostModel:
    """The posterior of one quantity's coefficients. Quantities are relative to their value with all units safe."""

    def __init__(self, rows: Array, values: Array, prior: _Prior, *, factor: float, noise: float) -> None:
        self._prior, self._factor, self._noise = prior, factor, noise
        self._rows = rows
        self._mean = prior.groups @ prior.means
        self._gram, self._cross = _covariances(rows, prior, factor)
        self._gram = self._gram + noise**2 * (1.0 + np.eye(len(rows)))  # all share the error of the reference
        self._inverse = np.linalg.inv(self._gram) if len(rows) else np.zeros((0, 0))
        self._residuals = values - rows @ self._mean
        self._weights = self._inverse @ self._residuals
        self.values = values

    @property
    def mean(self) -> Coefficients:
        return Coefficients((self._mean + self._cross @ self._weights)[None, :])

    def draw(self, rng: np.random.Generator, count: int) -> Coefficients:
        """Draw coefficients from the posterior: from the prior, then corrected by what that draw gets wrong."""
        prior = self._prior
        groups = prior.means + prior.spreads * rng.standard_normal((count, len(prior.means)))
        own = self._factor * prior.deviations * rng.standard_normal((count, len(prior.deviations)))
        drawn = groups @ prior.groups.T + own
        wrong = (self._residuals + self._rows @ self._mean)[None, :] - drawn @ self._rows.T
        wrong = wrong - self._noise * (rng.standard_normal(wrong.shape) + rng.standard_normal((count, 1)))
        return Coefficients(drawn + wrong @ self._inverse @ self._cross.T)

    def predict(self, rows: Array) -> tuple[Array, Array]:
        """Return mean and standard deviation of the quantity, without the noise of a measurement."""
        coefficients = self.mean.values[0]
        scaled = rows * (self._factor * self._prior.deviations)
        shared = (rows @ self._prior.groups) * self._prior.spreads
        variance = (scaled**2).sum(axis=1) + (shared**2).sum(axis=1)
        known = rows @ self._cross
        variance = variance - np.einsum("ij,jk,ik->i", known, self._inverse, known)
        return rows @ coefficients, np.sqrt(np.maximum(variance, 1e-18))

    def left_out(self) -> Array:
        """Return for each trial what the model predicts for it from the others."""
        return np.asarray(self.values - self._weights / np.diag(self._inverse))

    @property
    def noise(self) -> float:
        return self._noise


def fit_costs(
    encoding: Encoding, rows: Array, values: Array, prior: CostPrior | None, *, expected_change: float = 0.0
) -> CostModel:
    """Fit one quantity; its noise and how far the prior may be off are those that make the trials most likely.

    Args:
        encoding: of the rows.
        rows: encoded policies, (trials, columns).
        values: the quantity relative to all units safe, less 1: 0 there, negative where it is less.
        prior: None knows no unit from another.
        expected_change: without a prior, the change expected where no unit takes its safe choice.
    """
    known = _with_profile(encoding, prior) if prior is not None else _without_profile(encoding, expected_change)
    spread = max(float(np.std(values)), 1e-4) if len(values) else 1e-2
    best: tuple[float, float, float] = (-np.inf, 1.0, 0.03 * spread)
    if len(values) >= 2:
        for factor in DEVIATIONS:
            gram, _ = _covariances(rows, known, factor)
            eigenvalues, vectors = np.linalg.eigh(gram)
            turned = vectors.T @ (values - rows @ (known.groups @ known.means))
            for share in NOISES:
                noise = share * spread
                total = np.maximum(eigenvalues, 0.0) + noise**2
                likelihood = -0.5 * float((turned**2 / total).sum() + np.log(total).sum())
                likelihood -= 0.5 * np.log(factor) ** 2  # the prior's own errors are the best guess before any trial
                best = max(best, (likelihood, factor, noise))
    return CostModel(rows, values, known, factor=best[1], noise=best[2])


def _covariances(rows: Array, prior: _Prior, factor: float) -> tuple[Array, Array]:
    """Return rows @ S @ rows.T and S @ rows.T for the prior covariance S of the coefficients."""
    cross = (factor * prior.deviations)[:, None] ** 2 * rows.T
    cross = cross + prior.groups @ ((prior.spreads**2)[:, None] * (rows @ prior.groups).T)
    return rows @ cross, cross


def _with_profile(encoding: Encoding, prior: CostPrior) -> _Prior:
    names = encoding.parameters
    expected = [prior.units.get((names[u], str(encoding.choices[u][c])), 0.0) for u, c in encoding.unit_columns]
    at_borders = [prior.borders.get((names[a], names[b]), 0.0) for a, b in encoding.borders]
    sizes = np.abs(np.array([*expected, *at_borders]))
    floor = 0.3 * float(sizes.mean()) if sizes.size else 0.0
    num_units = len(expected)
    groups = np.zeros((len(sizes), 2))
    groups[:num_units, 0] = expected
    groups[num_units:, 1] = at_borders
    return _Prior(
        groups=groups,
        means=np.ones(2),
        spreads=np.full(2, prior.scale_error),
        deviations=np.maximum(prior.relative_error * sizes, prior.relative_error * floor) + 1e-9,
    )


def _without_profile(encoding: Encoding, expected_change: float) -> _Prior:
    labels = sorted({str(encoding.choices[u][c]) for u, c in encoding.unit_columns})
    columns = encoding.unit_columns
    num_units = max(1, len(encoding.parameters))
    groups = np.zeros((len(columns) + len(encoding.borders), len(labels) + 1))
    for column, (unit, choice) in enumerate(columns):
        groups[column, labels.index(str(encoding.choices[unit][choice]))] = 1.0 / num_units
    groups[len(columns) :, -1] = 1.0 / num_units
    means = np.array([expected_change] * len(labels) + [0.25 * abs(expected_change)])
    return _Prior(
        groups=groups,
        means=means,
        spreads=np.full(len(means), NO_PROFILE_SPREAD),
        deviations=np.array([NO_PROFILE_SPREAD / num_units] * len(columns) + [0.1 / num_units] * len(encoding.borders)),
    )
