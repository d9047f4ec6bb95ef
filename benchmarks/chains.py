"""Synthetic precision problems with a known optimum: chains with cast costs, what a trial says, a noisy profile.

A problem has 54 units with the choices fp32, autocast and fp16. A trial gives memory, throughput, an accuracy, the
held-out loss as a constraint and, where a unit overflowed, the name of the first one and nothing else: what a real
study gives. The gain of a policy is 1 - (memory + time) / 2, both relative to FP32. `optimum` is exact.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace

import numpy as np
from optuna.distributions import CategoricalDistribution
from scipy.special import ndtr

from autoprec.search.prior import CostPrior, PolicyPrior
from autoprec.search.solver import Solver

CHOICES = ("fp32", "autocast", "fp16")
NUM_UNITS = 54
LOSS_LIMIT = 200
"""In whole units of loss, so that the constrained optimum can be found exactly."""


@dataclass(frozen=True)
class Problem:
    """One problem. Costs are shares of FP32's; `loss` is in whole units of which `LOSS_LIMIT` are allowed."""

    name: str
    memory: np.ndarray
    time: np.ndarray
    loss: np.ndarray
    product: np.ndarray
    casts: dict[tuple[int, int], float]
    bad: frozenset[tuple[int, int]]
    extra: dict[tuple[int, int], np.ndarray] = field(default_factory=dict)
    shown_order: tuple[int, ...] = tuple(range(NUM_UNITS))
    shown_borders: tuple[tuple[int, int], ...] = ()
    time_noise: float = 0.01
    loss_noise: float = 0.05

    def half(self, unit: int) -> np.ndarray:
        """Whether the unit hands on half values, by choice: a norm under autocast hands on FP32."""
        return np.array([False, bool(self.product[unit]), True])

    def border(self, pair: tuple[int, int]) -> np.ndarray:
        first, second = (self.half(unit) for unit in pair)
        costs = self.casts.get(pair, 0.0) * (first[:, None] != second[None, :])
        return costs + self.extra.get(pair, 0.0)

    @property
    def pairs(self) -> list[tuple[int, int]]:
        return sorted({*self.casts, *self.extra})

    def evaluate(self, chosen: np.ndarray) -> tuple[float, float, int, int | None]:
        """Return memory, time, loss and the first bad unit."""
        units = np.arange(NUM_UNITS)
        time = self.time[units, chosen].sum() + sum(self.border(p)[chosen[p[0]], chosen[p[1]]] for p in self.pairs)
        first_bad = next((u for u in range(NUM_UNITS) if (u, int(chosen[u])) in self.bad), None)
        memory = self.memory[units, chosen].sum()
        return float(memory), float(max(time, 0.01)), int(self.loss[units, chosen].sum()), first_bad

    def gain(self, chosen: np.ndarray) -> float:
        """Return the true gain; 0 for a policy that fails or breaks the limit."""
        memory, time, loss, bad = self.evaluate(chosen)
        return 0.0 if bad is not None or loss > LOSS_LIMIT else 1.0 - 0.5 * (memory + time)

    def optimum(self) -> float:
        """Return the largest true gain there is: by a table over borders and loss, or without the loss's limit by
        elimination where pairs reach too far for a table."""
        unit_costs = 0.5 * (self.memory + self.time)
        unit_costs = unit_costs + np.array([[1e3 * ((u, c) in self.bad) for c in range(3)] for u in range(NUM_UNITS)])
        span = max((b - a for a, b in self.pairs), default=1)
        if span > 3:
            assert self.loss.sum(axis=0).max() <= LOSS_LIMIT, "a problem with far pairs has no limit on the loss"
            solver = Solver([3] * NUM_UNITS, self.pairs, max_states=3**13)
            assert solver.is_exact
            borders = {pair: 0.5 * self.border(pair)[None] for pair in self.pairs}
            chosen = solver.solve([row[None] for row in unit_costs], borders)[0]
            return self.gain(chosen)
        return 1.0 - self._cheapest(unit_costs, span)

    def _cheapest(self, unit_costs: np.ndarray, span: int) -> float:
        """Dynamic programming over the last `span` choices and the loss used so far."""
        table = {(): np.concatenate([[0.0], np.full(LOSS_LIMIT, np.inf)])}
        for unit in range(NUM_UNITS):
            following: dict[tuple[int, ...], np.ndarray] = {}
            for (recent, costs), choice in itertools.product(table.items(), range(3)):
                step = unit_costs[unit, choice]
                for back in range(1, min(span, unit) + 1):
                    pair = (unit - back, unit)
                    if pair in self.casts or pair in self.extra:
                        step += 0.5 * self.border(pair)[recent[-back], choice]
                used = int(self.loss[unit, choice])
                if used > LOSS_LIMIT:
                    continue
                moved = np.full(LOSS_LIMIT + 1, np.inf)
                moved[used:] = costs[: LOSS_LIMIT + 1 - used] + step
                key = (*recent, choice)[-span:]
                following[key] = np.minimum(following.get(key, np.inf), moved)
            table = following
        return float(min(costs.min() for costs in table.values()))

    def parameter(self, unit: int) -> str:
        return f"precision/unit{unit:02d}"

    @property
    def distributions(self) -> dict[str, CategoricalDistribution]:
        return {self.parameter(unit): CategoricalDistribution(CHOICES) for unit in self.shown_order}

    def profile(self, rng: np.random.Generator) -> PolicyPrior:
        """Return what a profile would say: every figure wrong by the errors named below."""
        names = [self.parameter(unit) for unit in range(NUM_UNITS)]

        def off(error: float) -> float:
            return float(np.exp(error * rng.standard_normal()))

        def changes(table: np.ndarray, error: float, scale: float) -> dict[tuple[str, str], float]:
            return {
                (names[u], CHOICES[c]): float(table[u, c] - table[u, 0]) * off(error) * scale
                for u in range(NUM_UNITS)
                for c in (1, 2)
            }

        shown = self.shown_borders or tuple(itertools.pairwise(self.shown_order))
        borders = {
            (names[a], names[b]): self.casts.get((min(a, b), max(a, b)), 0.005) * off(CAST_ERROR) for a, b in shown
        }
        loss = CostPrior(units=changes(self.loss / LOSS_LIMIT, SCORE_ERROR, off(SCORE_SCALE)), relative_error=0.7)
        return PolicyPrior(
            order=tuple(names[unit] for unit in self.shown_order),
            borders=tuple((names[a], names[b]) for a, b in self.shown_borders),
            costs={
                0: CostPrior(units=changes(self.memory, MEMORY_ERROR, 1.0), relative_error=0.15, scale_error=0.1),
                1: CostPrior(units=changes(self.time, TIME_ERROR, off(TIME_SCALE)), borders=borders),
            },
            constraints={"loss_gap": loss},
            failures=self._failures(rng, names),
            flows={
                (n, c): "half" if self.half(u)[i] else "fp32"
                for u, n in enumerate(names)
                for i, c in enumerate(CHOICES)
            },
        )

    def _failures(self, rng: np.random.Generator, names: list[str]) -> dict[tuple[str, str], float]:
        """Headroom below FP16's largest value, seen with an error of an octave, as a probability of overflowing."""
        known: dict[tuple[str, str], float] = {}
        for unit in range(NUM_UNITS):
            fails = (unit, 2) in self.bad
            headroom = rng.uniform(-4.0, -0.3) if fails else rng.uniform(1.0, 12.0)
            seen = headroom + HEADROOM_ERROR * rng.standard_normal()
            probability = float(np.clip(ndtr(-seen / 1.2), 0.002, 0.95))
            known[names[unit], "fp16"] = probability
            known[names[unit], "autocast"] = probability if self.product[unit] else 0.002
        return known


TIME_ERROR, TIME_SCALE = 0.3, 0.2
"""A roofline's error: 40 % at worst in a ratio beside published figures (docs/estimates.md)."""
MEMORY_ERROR = 0.15
"""Memory is computed to .2 %, but which tensors are alive at the peak depends on the whole policy."""
CAST_ERROR = 0.5
SCORE_ERROR, SCORE_SCALE = 0.7, 0.7
"""One backward tells a unit's effect on the loss within a factor of two, and the common scale no better."""
HEADROOM_ERROR = 1.0
"""In octaves: the range of a few steps against that of a training."""


def chain(rng: np.random.Generator, *, name: str = "chain", num_bad: int = 2, loss_share: float = 1.3) -> Problem:
    """A plain chain: 60 % products (half under autocast too), else norms, which autocast lifts to FP32."""
    product = rng.random(NUM_UNITS) < 0.6
    weight = np.exp(rng.standard_normal(NUM_UNITS))
    time32 = 0.9 * weight / weight.sum()
    size = np.exp(0.7 * rng.standard_normal(NUM_UNITS))
    memory32 = 0.7 * size / size.sum()
    time = np.stack([time32, time32, time32], axis=1)
    memory = np.stack([memory32, memory32, memory32], axis=1)
    speed = rng.uniform(0.35, 0.75, NUM_UNITS)
    time[:, 2] *= speed
    time[:, 1] *= np.where(product, speed * 1.03, rng.uniform(1.0, 1.1, NUM_UNITS))
    memory[:, 2] *= rng.uniform(0.5, 0.6, NUM_UNITS)
    memory[:, 1] = np.where(product, memory[:, 2], memory32 * rng.uniform(1.0, 1.2, NUM_UNITS))
    time[0] += 0.1
    memory[0] += 0.3
    bad_units = rng.choice(NUM_UNITS, size=num_bad, replace=False)
    score = np.exp(1.3 * rng.standard_normal(NUM_UNITS))
    score[bad_units] = 0.0
    loss16 = np.floor(loss_share * LOSS_LIMIT * score / score.sum()).astype(int)
    loss = np.stack([np.zeros(NUM_UNITS, int), np.where(product, loss16, loss16 // 10), loss16], axis=1)
    casts = {
        (u, u + 1): float(rng.uniform(0.1, 0.5) * np.exp(0.5 * rng.standard_normal()) / NUM_UNITS)
        for u in range(NUM_UNITS - 1)
    }
    bad = {(int(u), 2) for u in bad_units} | {(int(u), 1) for u in bad_units if product[u]}
    return Problem(name, memory, time, loss, product, casts, frozenset(bad))


def branches(rng: np.random.Generator) -> Problem:
    """Residual connections: every fourth unit also hands on to the unit three places later."""
    plain = chain(rng, name="branches")
    extra = {(u, u + 3): 0.5 * plain.casts[u, u + 1] for u in range(0, NUM_UNITS - 3, 4)}
    casts = {**plain.casts, **extra}
    return replace(plain, casts=casts, shown_borders=tuple(sorted(casts)))


def noise(rng: np.random.Generator) -> Problem:
    """Throughput within 5 %, loss within 20 % of its limit."""
    return replace(chain(rng, name="noise"), time_noise=0.05, loss_noise=0.2)


def must_stay(rng: np.random.Generator) -> Problem:
    """Six units that overflow."""
    return chain(rng, name="must stay", num_bad=6)


def wrong_order(rng: np.random.Generator) -> Problem:
    """A fifth of the neighbours stand in the wrong order."""
    order = list(range(NUM_UNITS))
    for place in range(0, NUM_UNITS - 1, 2):
        if rng.random() < 0.4:
            order[place], order[place + 1] = order[place + 1], order[place]
    return replace(chain(rng, name="wrong order"), shown_order=tuple(order))


def shuffled(rng: np.random.Generator) -> Problem:
    """The order says nothing about which units are neighbours."""
    return replace(chain(rng, name="shuffled"), shown_order=tuple(int(u) for u in rng.permutation(NUM_UNITS)))


def interactions(rng: np.random.Generator) -> Problem:
    """Twelve far pairs whose joint cost is as large as the units' own; no limit on the loss."""
    plain = chain(rng, name="interactions", loss_share=0.5)
    while True:
        extra = {}
        for _ in range(12):
            first, second = sorted(int(u) for u in rng.choice(NUM_UNITS, size=2, replace=False))
            if second - first > 3:
                extra[first, second] = 0.03 * rng.standard_normal((3, 3)) * np.array([[0, 1, 1], [1, 1, 1], [1, 1, 1]])
        if Solver([3] * NUM_UNITS, sorted({*plain.casts, *extra}), max_states=3**13).is_exact:
            return replace(plain, extra=extra)


def corner(rng: np.random.Generator) -> Problem:
    """Casts so dear that only long runs of half pay, and nearly everything is sensitive: the optimum is in a corner."""
    plain = chain(rng, name="corner", num_bad=2, loss_share=6.0)
    return replace(plain, casts={pair: 4.0 * cost for pair, cost in plain.casts.items()})


FRIENDLY = (chain, branches, noise, must_stay, wrong_order)
UNFRIENDLY = (interactions, shuffled, corner)
