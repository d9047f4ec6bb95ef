"""Which policy to try next: the solver's candidates, judged by what they may gain and whether they may fail."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr  # type: ignore[import-untyped]

from autoprec.search.cost_model import Coefficients, CostModel, Encoding, fit_costs
from autoprec.search.failures import failure_probabilities
from autoprec.search.prior import PolicyPrior
from autoprec.search.solver import Solver
from autoprec.search.trial_history import TrialHistory

__all__ = ["best_so_far", "propose"]

Array = NDArray[np.float64]
Choices = NDArray[np.intp]

NUM_DRAWS = 3
CAUTION = (0.0, 0.1, 0.3, 1.0, 3.0)
"""How much of the gain a constraint's whole distance to its limit is worth, in the solver's weightings."""
RISK = (0.2, 1.0)
"""The same for the logarithm of the probability that a training does not fail."""
EXPECTED_CHANGE = -0.3
"""Without a profile: half everywhere may change memory or time by this share."""
EXPECTED_USE = 0.5
"""Without a profile: half everywhere may use this share of the distance to a constraint's limit."""
ELSEWHERE = 4
"""Each so many proposals one looks at another place of the front than the preferred one."""
MIN_REPAIR = 0.2
"""A failed policy is tried again with just the named unit safe where its chance of success is then at least this."""
NUM_NEIGHBOURS = 2
FORBIDDEN = 1e6
MIN_TRIALS, MIN_CORRELATION = 14, 0.3
"""From so many trials on the model has to predict each trial from the others at least this well."""


@dataclass(frozen=True, slots=True)
class _Belief:
    """Everything that is believed of policies."""

    encoding: Encoding
    costs: Sequence[CostModel]
    constraints: Sequence[tuple[CostModel, float]]
    failures: Sequence[Array]
    allowed: Sequence[NDArray[np.bool_]]

    def pinned(self, row: Choices) -> Choices:
        """Return the policy with each pinned unit at its choice."""
        return np.array([c if own[c] else np.argmax(own) for c, own in zip(row, self.allowed, strict=True)], np.intp)

    def success(self, chosen: Choices) -> Array:
        """Return the probability that a training does not fail, for each row."""
        safe = np.ones(len(chosen))
        for unit, table in enumerate(self.failures):
            safe *= 1.0 - table[chosen[:, unit]]
        return safe

    def feasible(self, chosen: Choices, rows: Array) -> Array:
        """Return the probability that a training neither fails nor breaks a constraint, for each row."""
        probability = self.success(chosen)
        for model, limit in self.constraints:
            mean, deviation = model.predict(rows)
            probability *= ndtr((limit - mean) / (deviation + 0.1 * model.noise + 1e-9))
        return probability

    def gain(self, rows: Array, weights: Array) -> tuple[Array, Array]:
        """Return mean and standard deviation of the weighted gain over all units safe."""
        mean, variance = np.zeros(len(rows)), np.zeros(len(rows))
        for weight, model in zip(weights, self.costs, strict=True):
            if weight > 0:
                own, deviation = model.predict(rows)
                mean -= weight * own
                variance += (weight * deviation) ** 2
        return mean, np.sqrt(variance)


def propose(
    encoding: Encoding,
    history: TrialHistory,
    prior: PolicyPrior,
    *,
    weights: Array,
    number: int,
    rng: np.random.Generator,
) -> tuple[int, ...] | None:
    """Return the choice numbers of the next policy; None where the model does not fit and another sampler should.

    All units safe comes first. A policy that has just failed and named a unit comes again with only that unit safe,
    where it is then likely to succeed. Otherwise the best of the solver's candidates that were not tried yet.
    """
    if not history.has_reference:
        return encoding.safe
    belief = _believe(encoding, history, prior)
    repaired = _repaired(encoding, history, belief)
    if repaired is not None:
        return repaired
    if _misfits(belief, weights) and number % 2:
        return None
    if number % ELSEWHERE == ELSEWHERE - 1 and len(weights) > 1:
        weights = rng.dirichlet(np.ones(len(weights)))
    weights = weights / weights.sum()
    candidates = _solutions(belief, weights, rng)
    unseen = _with_neighbours(belief, history, candidates, weights)
    if not len(unseen):
        return _random_unseen(belief, history, rng)
    scores = _scores(belief, history, unseen, weights)
    return tuple(int(choice) for choice in unseen[int(np.argmax(scores))])


def best_so_far(history: TrialHistory, weights: Array) -> tuple[int, ...]:
    """Return the feasible policy with the largest measured gain; there has to be one."""
    gains = -sum(weight * q.values for weight, q in zip(weights, history.objectives, strict=True))
    complete = history.objectives[0].trials
    best = int(np.argmax(np.where(history.feasible[complete], gains, -np.inf)))
    return tuple(history.chosen[complete[best]].tolist())


def _believe(encoding: Encoding, history: TrialHistory, prior: PolicyPrior) -> _Belief:
    rows = encoding.rows(history.chosen)
    costs = [
        fit_costs(
            encoding,
            rows[q.trials],
            q.values,
            prior.costs.get(k),
            expected_change=EXPECTED_CHANGE if q.is_cost else 0.0,
        )
        for k, q in enumerate(history.objectives)
    ]
    constraints = [
        (
            fit_costs(encoding, rows[q.trials], q.values, prior.constraints.get(name), expected_change=EXPECTED_USE),
            q.limit,
        )
        for name, q in history.constraints.items()
        if q.limit is not None
    ]
    failures = failure_probabilities(encoding, history.verdicts, prior.failures)
    return _Belief(encoding, costs, constraints, failures, _allowed(encoding, prior))


def _allowed(encoding: Encoding, prior: PolicyPrior) -> list[NDArray[np.bool_]]:
    pins = [prior.pinned.get(name) for name in encoding.parameters]
    return [
        np.array([pin is None or pin not in map(str, own) or str(choice) == pin for choice in own], dtype=bool)
        for pin, own in zip(pins, encoding.choices, strict=True)
    ]


def _repaired(encoding: Encoding, history: TrialHistory, belief: _Belief) -> tuple[int, ...] | None:
    last = history.verdicts[-1] if history.verdicts else None
    if last is None or not last.failed or last.named is None:
        return None
    changed = belief.pinned(np.array(last.chosen, dtype=np.intp))
    changed[last.named] = encoding.safe[last.named]
    policy = tuple(changed.tolist())
    likely = float(belief.success(changed[None, :])[0]) >= MIN_REPAIR
    return policy if likely and policy not in history.seen else None


def _misfits(belief: _Belief, weights: Array) -> bool:
    """Whether what the model says of each trial from the others has little to do with what was measured."""
    measured = sum(w * m.values for w, m in zip(weights, belief.costs, strict=True))
    predicted = sum(w * m.left_out() for w, m in zip(weights, belief.costs, strict=True))
    if len(measured) < MIN_TRIALS or np.std(measured) == 0 or np.std(predicted) == 0:
        return False
    return float(np.corrcoef(measured, predicted)[0, 1]) < MIN_CORRELATION


def _solutions(belief: _Belief, weights: Array, rng: np.random.Generator) -> Choices:
    """Return the exact optima of the believed and of drawn costs, at every degree of caution and risk."""
    encoding = belief.encoding
    coefficients = _stacked(belief.costs, rng, weights)
    caution = [_stacked([model], rng, np.ones(1)) for model, _ in belief.constraints]
    worth = max(1e-6, float(np.abs(coefficients[0]).sum()) / 4)
    rows, risks = [], []
    for risk in RISK:
        for degree in CAUTION if belief.constraints else (0.0,):
            rows.append(coefficients + degree * worth * sum(caution, np.zeros_like(coefficients)))
            risks.append(np.full(len(coefficients), risk * worth))
    stacked = Coefficients(np.concatenate(rows))
    units = stacked.unit_costs(encoding)
    risk_factor = np.concatenate(risks)[:, None]
    units = [
        own - risk_factor * np.log1p(-table)[None, :] + np.where(allowed, 0.0, FORBIDDEN)[None, :]
        for own, table, allowed in zip(units, belief.failures, belief.allowed, strict=True)
    ]
    borders = stacked.border_costs(encoding)
    return Solver(encoding.sizes, encoding.borders).solve(units, borders)


def _stacked(models: Sequence[CostModel], rng: np.random.Generator, weights: Array) -> Array:
    """Return weighted coefficients, the mean's in the first row and draws below."""
    total = np.zeros((1 + NUM_DRAWS, len(models[0].mean.values[0])))
    for weight, model in zip(weights, models, strict=True):
        if weight > 0:
            total += weight * np.concatenate([model.mean.values, model.draw(rng, NUM_DRAWS).values])
    return total


def _with_neighbours(belief: _Belief, history: TrialHistory, candidates: Choices, weights: Array) -> Choices:
    """Return the candidates and the policies one unit away from the best of them and of the trials, the unseen ones."""
    tried = history.chosen[history.feasible]
    pool = np.array(list(dict.fromkeys(map(tuple, np.concatenate([candidates, tried]).tolist()))), dtype=np.intp)
    rows = belief.encoding.rows(pool)
    mean, _ = belief.gain(rows, weights)
    best = pool[np.argsort(-mean * belief.feasible(pool, rows), kind="stable")[:NUM_NEIGHBOURS]]
    pool = np.concatenate([candidates, *(_one_unit_away(belief, row) for row in best)])
    unseen = [row for row in dict.fromkeys(map(tuple, pool.tolist())) if row not in history.seen]
    return np.array(unseen, dtype=np.intp).reshape(len(unseen), len(belief.encoding.sizes))


def _one_unit_away(belief: _Belief, row: Choices) -> Choices:
    row = belief.pinned(row)
    columns = [(u, c) for u, own in enumerate(belief.allowed) for c in np.flatnonzero(own) if c != row[u]]
    changed = np.repeat(row[None, :], len(columns), axis=0)
    units, choices = np.array(columns, dtype=np.intp).reshape(-1, 2).T
    changed[np.arange(len(columns)), units] = choices
    return changed


def _scores(belief: _Belief, history: TrialHistory, chosen: Choices, weights: Array) -> Array:
    """Return the expected improvement on the best feasible trial, times the probability of being feasible."""
    rows = belief.encoding.rows(chosen)
    mean, deviation = belief.gain(rows, weights)
    best = 0.0
    if history.feasible.any():
        known, _ = belief.gain(belief.encoding.rows(history.chosen[history.feasible]), weights)
        best = float(known.max())
    deviation = deviation + 1e-4
    z = (mean - best) / deviation
    improvement = (mean - best) * ndtr(z) + deviation * np.exp(-0.5 * z**2) / math.sqrt(2 * math.pi)
    return np.asarray(np.maximum(improvement, 0.0) * belief.feasible(chosen, rows))


def _random_unseen(belief: _Belief, history: TrialHistory, rng: np.random.Generator) -> tuple[int, ...] | None:
    for _ in range(100):
        row = tuple(int(rng.choice(np.flatnonzero(own))) for own in belief.allowed)
        if row not in history.seen:
            return row
    return None
