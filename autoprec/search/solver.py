"""The cheapest assignment of choices to units, exactly: costs of units and of borders between them, together."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Solver", "Border", "total_costs"]

Border = tuple[int, int]
"""Two units between which values flow, the smaller number first."""
Costs = NDArray[np.float64]
Choices = NDArray[np.intp]

MAX_STATES = 20_000
"""Joint choices of the neighbours of one unit that are tabulated at once; a chain of 3 choices has 3."""


@dataclass(frozen=True, slots=True)
class _Plan:
    """Which unit is eliminated when, and what its table ranges over. Borders beyond `max_states` are left to polish."""

    steps: tuple[tuple[int, tuple[int, ...]], ...]
    kept: frozenset[Border]


class Solver:
    """Minimize sums of unit and border costs by eliminating one unit after another (dynamic programming on a chain).

    The result is the exact minimum wherever no table exceeds `max_states`: chains, branches, residual connections. On a
    graph that is denser the borders that span most are left out of the tables and the result is improved by
    changing one unit at a time at the full costs; `is_exact` tells.

    Args:
        sizes: number of choices of each unit.
        borders: pairs of units that have a border cost.
        max_states: limit of a table.
    """

    def __init__(self, sizes: Sequence[int], borders: Sequence[Border], *, max_states: int = MAX_STATES) -> None:
        self.sizes = tuple(sizes)
        self.borders = tuple(borders)
        for first, second in self.borders:
            if not 0 <= first < second < len(self.sizes):
                raise ValueError(f"border {(first, second)}; two different units of {len(self.sizes)}, smaller first")
        self._plan = _plan(self.sizes, frozenset(self.borders), max_states)

    @property
    def is_exact(self) -> bool:
        return len(self._plan.kept) == len(set(self.borders))

    @property
    def num_states(self) -> int:
        """Entries of all tables that a solve fills for each row of its batch: its work, up to a constant factor."""
        sizes = self.sizes
        return sum(sizes[unit] * math.prod(sizes[near] for near in nears) for unit, nears in self._plan.steps)

    def solve(self, units: Sequence[Costs], borders: Mapping[Border, Costs]) -> Choices:
        """Return the cheapest choices, shape (batch, units), of a batch of problems that share the graph.

        Args:
            units: for each unit its costs, shape (batch, choices).
            borders: for each border its costs, shape (batch, choices of the first, choices of the second).
        """
        batch = len(units[0])
        factors: list[tuple[tuple[int, ...], Costs]] = [((i,), costs) for i, costs in enumerate(units)]
        factors += [(pair, borders[pair]) for pair in self._plan.kept]
        tables: list[tuple[int, tuple[int, ...], Choices]] = []
        by_unit: dict[int, list[tuple[tuple[int, ...], Costs]]] = {i: [] for i in range(len(units))}
        rank = {unit: place for place, (unit, _) in enumerate(self._plan.steps)}
        for scope, costs in factors:
            by_unit[min(scope, key=rank.__getitem__)].append((scope, costs))
        for unit, neighbours in self._plan.steps:
            table = _sum(by_unit.pop(unit), (*neighbours, unit), batch)
            tables.append((unit, neighbours, table.argmin(axis=-1)))
            if neighbours:
                by_unit[min(neighbours, key=rank.__getitem__)].append((neighbours, table.min(axis=-1)))
        chosen = _trace_back(tables, batch, len(units))
        return chosen if self.is_exact else self._polish(chosen, units, borders)

    def _polish(self, chosen: Choices, units: Sequence[Costs], borders: Mapping[Border, Costs]) -> Choices:
        """Change one unit at a time to its cheapest choice given the others, until nothing changes."""
        rows = np.arange(len(chosen))
        for _ in range(len(self.sizes)):
            before = chosen.copy()
            for unit in range(len(self.sizes)):
                costs = units[unit].copy()
                for (first, second), table in borders.items():
                    if first == unit:
                        costs += table[rows, :, chosen[:, second]]
                    elif second == unit:
                        costs += table[rows, chosen[:, first], :]
                chosen[:, unit] = costs.argmin(axis=1)
            if np.array_equal(before, chosen):
                break
        return chosen


def total_costs(chosen: Choices, units: Sequence[Costs], borders: Mapping[Border, Costs]) -> Costs:
    """Return the cost of each row of `chosen` (batch, units) at costs shaped as for `Solver.solve`."""
    rows = np.arange(len(chosen))
    total = np.zeros(len(chosen))
    for unit, costs in enumerate(units):
        total += costs[rows, chosen[:, unit]]
    for (first, second), table in borders.items():
        total += table[rows, chosen[:, first], chosen[:, second]]
    return total


def _sum(factors: Sequence[tuple[tuple[int, ...], Costs]], scope: tuple[int, ...], batch: int) -> Costs:
    """Add tables over parts of `scope` to one over the whole of it; axis 0 is the batch."""
    total: Any = 0.0
    for own, costs in factors:
        order = sorted(range(len(own)), key=lambda axis: scope.index(own[axis]))
        aligned = costs.transpose(0, *(axis + 1 for axis in order))
        sizes = dict(zip((own[axis] for axis in order), aligned.shape[1:], strict=True))
        total = total + aligned.reshape(batch, *(sizes.get(unit, 1) for unit in scope))
    return np.asarray(total)


def _trace_back(tables: Sequence[tuple[int, tuple[int, ...], Choices]], batch: int, num_units: int) -> Choices:
    chosen = np.zeros((batch, num_units), dtype=np.intp)
    rows = np.arange(batch)
    for unit, neighbours, best in reversed(tables):
        chosen[:, unit] = best[(rows, *(chosen[:, other] for other in neighbours))]
    return chosen


@lru_cache(maxsize=64)
def _plan(sizes: tuple[int, ...], borders: frozenset[Border], max_states: int) -> _Plan:
    kept = set(borders)
    while True:
        steps = _elimination(sizes, kept)
        widest = max(steps, key=lambda step: _num_states(sizes, step))
        if not kept or _num_states(sizes, widest) <= max_states:
            return _Plan(tuple(steps), frozenset(kept))
        around = {widest[0], *widest[1]}
        inside = [border for border in kept if around & set(border)]
        kept.remove(max(inside, key=lambda border: (border[1] - border[0], border)))


def _elimination(sizes: tuple[int, ...], borders: set[Border]) -> list[tuple[int, tuple[int, ...]]]:
    """Eliminate next the unit whose table is smallest; return each with its neighbours at that time."""
    neighbours: dict[int, set[int]] = {unit: set() for unit in range(len(sizes))}
    for first, second in borders:
        neighbours[first].add(second)
        neighbours[second].add(first)
    steps: list[tuple[int, tuple[int, ...]]] = []
    while neighbours:
        unit = min(neighbours, key=lambda u: (math.prod(sizes[other] for other in neighbours[u]), u))
        around = neighbours.pop(unit)
        for other in around:
            neighbours[other] |= around - {other}
            neighbours[other].discard(unit)
        steps.append((unit, tuple(sorted(around))))
    return steps


def _num_states(sizes: tuple[int, ...], step: tuple[int, tuple[int, ...]]) -> int:
    return math.prod(sizes[unit] for unit in (step[0], *step[1]))
