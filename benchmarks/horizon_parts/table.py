"""The tables: how well each length ranks the policies of the long training, and how often its verdicts err."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from scipy.stats import spearmanr

from autoprec.search.judging import VerdictKind
from autoprec.search.proof import Proof
from horizon_parts.verdicts import END, Horizon, Quantity, Rule

__all__ = ["lines"]

SHARES = (0.05, 0.1)
QUANTITIES: tuple[tuple[Quantity, ...], ...] = (("metric",), ("loss",), ("metric", "loss"))
MIN_LOSS_GAINS = (0.0, 0.02, 0.05, 0.1, 0.2)
DEFAULT = Rule()
SHARE = DEFAULT.proof.max_lost_share
HEADER = (
    f"{'arms':>5} {'proved':>7} {'false':>6} {'refuted':>8} {'good':>5} {'open':>5} {'good':>5}"
    f" {'insens.':>8} {'good':>5} {'good in all':>12}"
)


@dataclass(frozen=True, slots=True)
class Counts:
    """How many policies of a length got which verdict, and how many of those are good at the end."""

    verdicts: Sequence[tuple[VerdictKind, bool]]

    def of(self, verdict: VerdictKind, *, good: bool | None = None) -> int:
        return sum(v == verdict and good in (None, g) for v, g in self.verdicts)

    def __str__(self) -> str:
        parts = [f"{len(self.verdicts):>5} {self.of('proved'):>7} {self.of('proved', good=False):>6}"]
        columns: tuple[tuple[VerdictKind, int], ...] = (("refuted", 8), ("open", 5), ("insensitive", 8))
        for verdict, width in columns:
            parts.append(f"{self.of(verdict):>{width}} {self.of(verdict, good=True):>5}")
        return " ".join([*parts, f"{sum(good for _, good in self.verdicts):>12}"])


def count(horizon: Horizon, arms: Sequence[tuple[str, str]], num_steps: int, rule: Rule) -> Counts:
    return Counts([(horizon.verdict(*arm, num_steps, rule), horizon.is_good(*arm, rule)) for arm in arms])


def lengthened(horizon: Horizon, lengths: Sequence[int], rule: Rule) -> Counts:
    """Count as a proof goes: at its first length, and at the next longer one where FP32 gained too little."""
    tried = [n for n in lengths if rule.proof.num_steps <= n < END]
    found: dict[tuple[str, str], tuple[VerdictKind, bool]] = {}
    for n in tried:
        for arm in horizon.arms(n):
            if arm not in found or found[arm][0] == "insensitive":
                found[arm] = (horizon.verdict(*arm, n, rule), horizon.is_good(*arm, rule))
    return Counts(list(found.values()))


def correlation(horizon: Horizon, arms: Sequence[tuple[str, str]], num_steps: int, quantity: Quantity) -> float:
    """Return Spearman's over policies: of what each keeps of FP32's gain at this length, with that at the end."""
    short, long = ([horizon.kept(*arm, n, quantity) for arm in arms] for n in (num_steps, END))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # all equal: no correlation, shown as nan
        return float(spearmanr(short, long).statistic)


def lines(horizon: Horizon, lengths: Sequence[int]) -> Iterator[str]:
    """Yield the tables of all lengths that have runs; "longer" is a proof that starts with the default's steps."""
    lengths = [n for n in lengths if n < END and horizon.arms(n)]
    yield from ("", "Spearman's rank correlation, over policies, of the difference to FP32 with that at the end")
    yield f"{'steps':>6} {'seeds':>6} {'arms':>5}  " + "  ".join(f"{t:>13}" for t in [*horizon.tasks(), "all tasks"])
    for n in lengths:
        arms, (fewest, most) = horizon.arms(n), horizon.num_seeds(n)
        groups = [[arm for arm in arms if arm[0] == task] for task in horizon.tasks()]
        cells = [
            "/".join(f"{correlation(horizon, group, n, q):6.2f}" for q in ("metric", "loss")) if len(group) > 2 else "-"
            for group in [*groups, arms]
        ]
        seeds = f"{fewest}-{most}" if fewest != most else f"{most}"
        yield f"{n:>6} {seeds:>6} {len(arms):>5}  " + "  ".join(f"{cell:>13}" for cell in cells)
    yield from ("", "FP32's gain over the start weights: of the metric, and of the loss as a share of the start's")
    for n in lengths:
        yield f"{n:>6} {'':>13}" + "  ".join(f"{_gain(horizon, task, n):>13}" for task in horizon.tasks())
    for share, quantities, watches in itertools.product(SHARES, QUANTITIES, (True, False)):
        proof = Proof(max_lost_share=share, max_half=Proof().max_half if watches else math.inf)
        rule = Rule(proof, quantities)
        looked = "" if watches else ", headroom not looked at"
        title = f"margin {share:g} of FP32's gain, {' and '.join(quantities)}{looked}"
        yield from ("", title, f"{'steps':>6} {HEADER}")
        yield from (f"{n:>6} {count(horizon, horizon.arms(n), n, rule)}" for n in lengths)
        yield f"{'longer':>6} {lengthened(horizon, lengths, rule)}"
    yield from ("", f"margin {SHARE:g}, metric and loss: FP32's least gain in loss, as a share of the start's")
    yield f"{'gate':>6} {'steps':>6} {HEADER}"
    for gate in MIN_LOSS_GAINS:
        for n in lengths:
            yield f"{gate:>6g} {n:>6} {count(horizon, horizon.arms(n), n, Rule(Proof(min_loss_gain=gate)))}"
    yield from ("", f"margin {SHARE:g}, metric and loss, by task", f"{'task':>8} {'steps':>6} {HEADER}")
    for task in horizon.tasks():
        for n in lengths:
            arms = [arm for arm in horizon.arms(n) if arm[0] == task]
            yield f"{task:>8} {n:>6} {count(horizon, arms, n, DEFAULT)}"
    yield from (
        "",
        f"errors at margin {SHARE:g}, metric and loss: kept of FP32's gain, metric/loss (0 is equal)",
    )
    yield from _errors(horizon, lengths)


def _gain(horizon: Horizon, task: str, num_steps: int) -> str:
    policy = next((policy for t, policy in horizon.arms(num_steps) if t == task), None)
    if policy is None:
        return "-"
    gains = horizon.gains(task, policy, num_steps, "metric")
    return f"{sum(gains) / len(gains):6.3f}/{horizon.loss_gain(task, policy, num_steps):6.3f}"


def _errors(horizon: Horizon, lengths: Sequence[int]) -> Iterator[str]:
    for n in lengths:
        for task, policy in horizon.arms(n):
            verdict, good = horizon.verdict(task, policy, n, DEFAULT), horizon.is_good(task, policy, DEFAULT)
            if (verdict == "proved" and not good) or (verdict == "refuted" and good):
                kept = [f"{horizon.kept(task, policy, m, q):+.3f}" for m in (n, END) for q in ("metric", "loss")]
                kind = "false proof" if verdict == "proved" else "false refusal"
                yield f"{n:>6} {kind:<13} {task}: {policy}: {kept[0]}/{kept[1]} here, {kept[2]}/{kept[3]} at the end"
