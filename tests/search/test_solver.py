"""The exact solver against every assignment there is."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from autoprec.search.solver import Solver, total_costs

GRAPHS = {
    "chain": (6, [(i, i + 1) for i in range(5)]),
    "branches": (7, [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (5, 6), (0, 3), (3, 6), (1, 4)]),
    "dense": (5, list(itertools.combinations(range(5), 2))),
    "no borders": (4, []),
    "two parts": (6, [(0, 1), (2, 5), (3, 4)]),
}


def random_costs(sizes, borders, *, batch, seed):
    rng = np.random.default_rng(seed)
    units = [rng.standard_normal((batch, size)) for size in sizes]
    return units, {pair: rng.standard_normal((batch, sizes[pair[0]], sizes[pair[1]])) for pair in borders}


def cheapest(sizes, units, borders):
    every = np.array(list(itertools.product(*map(range, sizes))), dtype=np.intp)
    batch = len(units[0])
    best = []
    for row in range(batch):
        own = [np.repeat(costs[row : row + 1], len(every), axis=0) for costs in units]
        pairs = {pair: np.repeat(costs[row : row + 1], len(every), axis=0) for pair, costs in borders.items()}
        best.append(total_costs(every, own, pairs).min())
    return np.array(best)


@pytest.mark.parametrize("name", GRAPHS)
def test_the_solution_is_the_minimum_over_all_assignments(name: str) -> None:
    num_units, borders = GRAPHS[name]
    sizes = [2 + unit % 3 for unit in range(num_units)]
    units, pairs = random_costs(sizes, borders, batch=8, seed=len(name))
    solver = Solver(sizes, borders)
    found = total_costs(solver.solve(units, pairs), units, pairs)
    assert solver.is_exact
    np.testing.assert_allclose(found, cheapest(sizes, units, pairs), rtol=0, atol=1e-12)


def test_a_graph_too_dense_for_its_tables_is_improved_and_says_that_it_is_not_exact() -> None:
    sizes = [3] * 8
    borders = list(itertools.combinations(range(8), 2))
    units, pairs = random_costs(sizes, borders, batch=20, seed=3)
    solver = Solver(sizes, borders, max_states=81)
    found = total_costs(solver.solve(units, pairs), units, pairs)
    best = cheapest(sizes, units, pairs)
    assert not solver.is_exact
    assert (found >= best - 1e-12).all()
    typical = total_costs(np.zeros((20, 8), dtype=np.intp), units, pairs)
    assert np.mean((typical - found) / (typical - best)) > 0.7


def test_a_border_names_two_units_the_smaller_first() -> None:
    with pytest.raises(ValueError, match=r"border \(1, 0\)"):
        Solver([2, 2], [(1, 0)])


@pytest.mark.parametrize(
    ("borders", "num_states"),
    [
        ([(i, i + 1) for i in range(53)], 53 * 9 + 3),
        ([(i, i + 1) for i in range(53)] + [(i, i + 3) for i in range(0, 51, 3)], 17 * (27 + 27 + 9) + 21),
    ],
    ids=["chain", "residual"],
)
def test_the_work_of_54_units_grows_with_their_number_not_with_that_of_their_policies(
    borders: list[tuple[int, int]], num_states: int
) -> None:
    assert Solver([3] * 54, borders).num_states == num_states
