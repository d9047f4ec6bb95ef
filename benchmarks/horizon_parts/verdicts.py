"""From kept runs to verdicts: what a policy keeps of FP32's gain over the start weights, at a length and at the end."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from autoprec.search.statistics import interval
from autoprec.trials.outcome import Outcome
from horizon_parts.running import REFERENCE

__all__ = ["END", "Horizon", "Quantity", "Rule", "Verdict"]

END = 1_200
"""Steps of the long training."""
ALPHA = 0.025
"""Chance to err of one look, as a proof with two looks has it."""
MAX_HALF = 65504.0 / 4
TIMES_MARGIN = 3.0
"""FP32's own gain must be shown to be that many margins."""

Quantity = Literal["metric", "loss"]
Verdict = Literal["proved", "refuted", "open", "insensitive"]


@dataclass(frozen=True, slots=True)
class Rule:
    """How a proof decides.

    Attributes:
        share: the part of FP32's gain that a policy may lose.
        quantities: what is tested; each must be proved, one that is refuted refutes.
        min_loss_gain: FP32's least gain in held-out loss, as a share of the start's loss, for a proof to say anything.
        watches_headroom: a half value in the last factor of 4 of FP16 refutes.
    """

    share: float
    quantities: tuple[Quantity, ...] = ("metric", "loss")
    min_loss_gain: float = 0.0
    watches_headroom: bool = True


class Horizon:
    """The outcomes of all runs by task, policy, steps and seed; larger values are better, the loss is negated."""

    def __init__(self, runs: Sequence[dict[str, Any]]) -> None:
        self._outcomes: dict[tuple[str, str, int], dict[int, Outcome]] = {}
        for run in runs:
            key = (run["task"], run["policy"], run["num_steps"])
            self._outcomes.setdefault(key, {})[run["seed"]] = Outcome.model_validate(run["outcome"])

    def arms(self, num_steps: int) -> list[tuple[str, str]]:
        """Return every task and policy that has two paired seeds at this length and one at the end."""
        return [
            (task, policy)
            for task, policy, n in self._outcomes
            if n == num_steps
            and policy != REFERENCE
            and len(self._pairs(task, policy, n)) >= 2
            and self._pairs(task, policy, END)
        ]

    def tasks(self) -> list[str]:
        return list(dict.fromkeys(task for task, _, _ in self._outcomes))

    def num_seeds(self, num_steps: int) -> tuple[int, int]:
        """Return the fewest and the most paired seeds of any arm at this length."""
        counts = [len(self._pairs(task, policy, num_steps)) for task, policy in self.arms(num_steps)]
        return (min(counts), max(counts)) if counts else (0, 0)

    def _pairs(self, task: str, policy: str, num_steps: int) -> list[tuple[Outcome, Outcome]]:
        arm, fp32 = (self._outcomes.get((task, name, num_steps), {}) for name in (policy, REFERENCE))
        return [(arm[seed], fp32[seed]) for seed in sorted(arm) if seed in fp32]

    def gains(self, task: str, policy: str, num_steps: int, quantity: Quantity) -> list[float]:
        """Return what FP32 gained over the start weights, one value a seed."""
        return [_end(fp32, quantity) - _start(fp32, quantity) for _, fp32 in self._pairs(task, policy, num_steps)]

    def differences(self, task: str, policy: str, num_steps: int, quantity: Quantity) -> list[float]:
        """Return arm minus FP32, one value a seed; a run that diverged lost all that FP32 gained."""
        pairs = self._pairs(task, policy, num_steps)
        return [
            (_end(arm, quantity) if arm.is_ok else _start(fp32, quantity)) - _end(fp32, quantity) for arm, fp32 in pairs
        ]

    def kept(self, task: str, policy: str, num_steps: int, quantity: Quantity) -> float:
        """Return the mean difference to FP32 as a share of FP32's mean gain: 0 is equal, -1 has learned nothing."""
        gain = statistics.fmean(self.gains(task, policy, num_steps, quantity))
        difference = statistics.fmean(self.differences(task, policy, num_steps, quantity))
        return difference / gain if gain > 0 else math.copysign(min(1.0, abs(difference)), difference)

    def verdict(self, task: str, policy: str, num_steps: int, rule: Rule) -> Verdict:
        arms = [arm for arm, _ in self._pairs(task, policy, num_steps)]
        if any(arm.blames_precision for arm in arms):
            return "refuted"
        if rule.watches_headroom and any(arm.headroom is not None and arm.headroom.largest > MAX_HALF for arm in arms):
            return "refuted"
        found = [self._tested(task, policy, num_steps, quantity, rule) for quantity in rule.quantities]
        if self.loss_gain(task, policy, num_steps) < rule.min_loss_gain:
            found.append("insensitive")
        order: tuple[Verdict, ...] = ("insensitive", "refuted", "open", "proved")
        return next(verdict for verdict in order if verdict in found)

    def loss_gain(self, task: str, policy: str, num_steps: int) -> float:
        """Return FP32's mean gain in held-out loss as a share of the start's loss."""
        starts = [-_start(fp32, "loss") for _, fp32 in self._pairs(task, policy, num_steps)]
        return sum(self.gains(task, policy, num_steps, "loss")) / sum(starts)

    def _tested(self, task: str, policy: str, num_steps: int, quantity: Quantity, rule: Rule) -> Verdict:
        gains = self.gains(task, policy, num_steps, quantity)
        gain = interval(gains, alpha=ALPHA)
        if gain.mean <= 0 or gain.low < TIMES_MARGIN * rule.share * gain.mean:
            return "insensitive"
        differences = self.differences(task, policy, num_steps, quantity)
        contrast = interval([d + rule.share * g for d, g in zip(differences, gains, strict=True)], alpha=ALPHA)
        return "proved" if contrast.low > 0 else "refuted" if contrast.high < 0 else "open"

    def is_good(self, task: str, policy: str, rule: Rule) -> bool:
        """Whether the policy is within the margin at the end: by the mean over the seeds, no run diverged."""
        if any(arm.blames_precision for arm, _ in self._pairs(task, policy, END)):
            return False
        return all(self.kept(task, policy, END, quantity) >= -rule.share for quantity in rule.quantities)


def _end(outcome: Outcome, quantity: Quantity) -> float:
    number = outcome.accuracy if quantity == "metric" else outcome.eval_loss
    assert number is not None
    return number.value if quantity == "metric" else -number.value


def _start(outcome: Outcome, quantity: Quantity) -> float:
    number = outcome.start_accuracy if quantity == "metric" else outcome.start_eval_loss
    assert number is not None
    return number.value if quantity == "metric" else -number.value
