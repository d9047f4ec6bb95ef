"""Which choices make a training fail: probabilities that each trial, finished or failed, corrects."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autoprec.search.cost_model import Encoding

__all__ = ["Verdict", "failure_probabilities"]

UNKNOWN = 0.02
"""Probability that a choice about which nothing is known makes a training fail."""
CLEARED, NAMED, CONTRADICTED = 0.001, 0.98, 0.5
"""After a training with it that did not fail; after one that named it; after one of each."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one trial said: its choices, whether it failed, and the unit that it named (None: it named none)."""

    chosen: tuple[int, ...]
    failed: bool
    named: int | None = None


def failure_probabilities(
    encoding: Encoding, verdicts: Iterable[Verdict], known: Mapping[tuple[str, str], float]
) -> list[NDArray[np.float64]]:
    """Return for each unit the probability that each of its choices alone makes a training fail; 0 for the safe one.

    A training that did not fail clears all its choices. One that failed and named a unit marks that choice; one that
    named none raises all its choices that are not cleared, by Bayes' rule for "at least one of them".
    """
    verdicts = list(verdicts)
    table = [_start(encoding, unit, known) for unit in range(len(encoding.choices))]
    named = {(v.named, v.chosen[v.named]) for v in verdicts if v.failed and v.named is not None}
    cleared = {(unit, c) for v in verdicts if not v.failed for unit, c in enumerate(v.chosen)}
    for unit, choice in cleared - named:
        table[unit][choice] = min(table[unit][choice], CLEARED)
    for unit, choice in named:
        if choice != encoding.safe[unit]:
            table[unit][choice] = CONTRADICTED if (unit, choice) in cleared else NAMED
    for verdict in verdicts:
        if verdict.failed and verdict.named is None:
            _raise_all(table, verdict)
    return table


def _start(encoding: Encoding, unit: int, known: Mapping[tuple[str, str], float]) -> NDArray[np.float64]:
    name = encoding.parameters[unit]
    start = np.array([known.get((name, str(choice)), UNKNOWN) for choice in encoding.choices[unit]])
    start[encoding.safe[unit]] = 0.0
    return np.clip(start, 0.0, NAMED)


def _raise_all(table: list[NDArray[np.float64]], verdict: Verdict) -> None:
    own = np.array([table[unit][choice] for unit, choice in enumerate(verdict.chosen)])
    at_least_one = 1.0 - float(np.prod(1.0 - own))
    if at_least_one <= 0.0:
        return
    for unit, choice in enumerate(verdict.chosen):
        table[unit][choice] = min(NAMED, table[unit][choice] / at_least_one)
