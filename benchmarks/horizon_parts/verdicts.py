"""From kept runs to verdicts: the project's own judge at a length, and what is kept of FP32's gain at the end."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from autoprec.search.judging import Contender, VerdictKind, judge
from autoprec.search.metric import Metric
from autoprec.search.proof import Proof
from autoprec.search.sensitivity import what_was_learned
from autoprec.trials.outcome import Outcome
from horizon_parts.policies import FP32
from horizon_parts.running import REFERENCE

__all__ = ["END", "Horizon", "Quantity", "Rule"]

END = 1_200
"""Steps of the long training."""

Quantity = Literal["metric", "loss"]


@dataclass(frozen=True, slots=True)
class Rule:
    """How a proof decides: the plan that `judge` follows, and which held-out numbers it is shown."""

    proof: Proof = field(default_factory=Proof)
    quantities: tuple[Quantity, ...] = ("metric", "loss")


class Horizon:
    """The outcomes of all runs by task, policy, steps and seed; larger values are better, the loss is negated."""

    def __init__(self, runs: Sequence[dict[str, Any]], metrics: Mapping[str, Metric]) -> None:
        self._metrics = metrics
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

    def verdict(self, task: str, policy: str, num_steps: int, rule: Rule) -> VerdictKind:
        """Return what the proof says at this length, on all seeds that it has, each of the looks at its own error."""
        pairs = [tuple(_shown(o, rule) for o in pair) for pair in self._pairs(task, policy, num_steps)]
        arm, fp32 = Contender(policy, FP32, policy), Contender(REFERENCE, FP32, REFERENCE)
        known = {(c.key, i): pair[place] for i, pair in enumerate(pairs) for place, c in enumerate((arm, fp32))}
        metric = Metric("loss", is_loss=True) if rule.quantities == ("loss",) else self._metrics[task]
        learned = what_was_learned([pair[1] for pair in pairs], rule.proof, metric, num_steps=num_steps)
        level = rule.proof.alpha_per_look
        return judge(arm, fp32, known, len(pairs), rule.proof, metric, learned, level=level).kind

    def loss_gain(self, task: str, policy: str, num_steps: int) -> float:
        """Return FP32's mean gain in held-out loss as a share of the start's loss."""
        starts = [-_start(fp32, "loss") for _, fp32 in self._pairs(task, policy, num_steps)]
        return sum(self.gains(task, policy, num_steps, "loss")) / sum(starts)

    def is_good(self, task: str, policy: str, rule: Rule) -> bool:
        """Whether the policy is within the margin at the end: by the mean over the seeds, no run diverged."""
        if any(arm.blames_precision for arm, _ in self._pairs(task, policy, END)):
            return False
        return all(self.kept(task, policy, END, quantity) >= -rule.proof.max_lost_share for quantity in rule.quantities)


def _shown(outcome: Outcome, rule: Rule) -> Outcome:
    """Leave out the number that the rule does not test; the loss alone takes the metric's place."""
    if rule.quantities == ("metric",):
        return outcome.model_copy(update={"eval_loss": None, "start_eval_loss": None})
    if rule.quantities == ("metric", "loss"):
        return outcome
    negated = [n and n.model_copy(update={"value": -n.value}) for n in (outcome.eval_loss, outcome.start_eval_loss)]
    return outcome.model_copy(update={"accuracy": negated[0], "start_accuracy": negated[1]})


def _end(outcome: Outcome, quantity: Quantity) -> float:
    number = outcome.accuracy if quantity == "metric" else outcome.eval_loss
    assert number is not None
    return number.value if quantity == "metric" else -number.value


def _start(outcome: Outcome, quantity: Quantity) -> float:
    number = outcome.start_accuracy if quantity == "metric" else outcome.start_eval_loss
    assert number is not None
    return number.value if quantity == "metric" else -number.value
