"""What stands behind a study's accuracy: the metric's own name, direction and smallest step.

Inside the study every metric is larger where it is better, as `Evaluation` gives it; a person, a policy file and a
report see it under its own name and with its own sign. Only this module converts.
"""

from __future__ import annotations

from dataclasses import dataclass

from autoprec.policy import Number
from autoprec.tasks.batches import count_samples, open_batches
from autoprec.tasks.protocol import Task

__all__ = ["Metric", "metric_of"]


@dataclass(frozen=True, slots=True)
class Metric:
    """The held-out number by which arms are compared.

    Attributes:
        name: the task's own; "held-out loss" for a task without a metric, which that loss stands for.
        higher_is_better: its own direction.
        resolution: its smallest step; 0 where that is unknown.
        is_loss: it is the held-out loss, so that there is nothing beside it to test.
    """

    name: str = "accuracy"
    higher_is_better: bool = True
    resolution: float = 0.0
    is_loss: bool = False

    def own(self, stored: Number) -> Number:
        """Return a number of the study under the metric's own sign; its interval turns round with it."""
        if self.higher_is_better:
            return stored
        low, high = (None if bound is None else -bound for bound in (stored.high, stored.low))
        return Number(value=-stored.value, kind=stored.kind, low=low, high=high)


def metric_of(task: Task) -> Metric:
    """Return the metric of a task. The step of an accuracy is one sample of the held-out data."""
    if task.metric is None and task.evaluate is None:
        return Metric("held-out loss", higher_is_better=False, is_loss=True)
    resolution = 0.0
    if task.metric_name == "accuracy":
        count = task.num_samples or count_samples
        resolution = 1.0 / max(1, sum(count(batch) for batch in open_batches(task.eval_batches, name="eval_batches")))
    return Metric(task.metric_name, task.metric_direction == "maximize", resolution)
