"""benchmarks/horizon.py counts right: verdicts, errors and rank correlations of outcomes made by hand."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from horizon_parts.policies import policies_of
from horizon_parts.table import correlation, count, lengthened
from horizon_parts.tasks import TASKS
from horizon_parts.verdicts import END, Horizon, Rule

from autoprec.apply import applied_policy, apply_policy, remove_policy
from autoprec.policy import Number
from autoprec.search.metric import Metric
from autoprec.search.proof import Proof
from autoprec.trials.outcome import Headroom, Outcome

METRIC = Rule(quantities=("metric",))
SEEDS = range(4)


def outcomes(policy: str, num_steps: int, metrics: list[float], **fields: Any) -> list[dict[str, Any]]:
    """FP32 goes from .1 to .9 and its loss from 2 to 1; the loss of an arm is FP32's."""
    start = {"start_accuracy": 0.1, "start_eval_loss": 2.0} if policy == "fp32" else {}
    found = {name: Number(value=value, kind="measured") for name, value in {**start, "eval_loss": 1.0}.items()}
    return [
        {
            "task": "toy",
            "policy": policy,
            "num_steps": num_steps,
            "seed": seed,
            "outcome": Outcome(
                kind="ok", accuracy=Number(value=metric, kind="measured"), **{**found, **fields}
            ).model_dump(mode="json"),
        }
        for seed, metric in enumerate(metrics)
    ]


def horizon(*metrics: list[float], end: float = 0.9, **fields: Any) -> Horizon:
    runs = [run for n in (40, END) for run in outcomes("fp32", n, [0.9] * len(SEEDS))]
    runs += [run for i, values in enumerate(metrics) for run in outcomes(f"arm {i}", 40, values, **fields)]
    runs += [run for i in range(len(metrics)) for run in outcomes(f"arm {i}", END, [end - 0.01 * i] * len(SEEDS))]
    return Horizon(runs, {"toy": Metric()})


@pytest.mark.parametrize(
    ("metrics", "verdict"),
    [
        pytest.param([0.85, 0.85, 0.85, 0.85], "proved", id="within a tenth of the gain of .8"),
        pytest.param(
            [0.81, 0.83, 0.85, 0.87], "open", id="mean .02 above the margin, half-width 3.18 x .0258 / 2 = .041"
        ),
        pytest.param([0.79, 0.79, 0.79, 0.79], "refuted", id="below the margin without doubt"),
        pytest.param([0.5, 0.8, 0.95, 0.9], "open", id="too wide to tell"),
    ],
)
def test_an_arm_is_held_to_a_share_of_what_fp32_gained(metrics: list[float], verdict: str) -> None:
    assert horizon(metrics).verdict("toy", "arm 0", 40, METRIC) == verdict


def test_a_metric_and_a_loss_are_both_needed() -> None:
    worse_loss = horizon([0.89] * 4, eval_loss=Number(value=1.2, kind="measured"))
    assert worse_loss.verdict("toy", "arm 0", 40, METRIC) == "proved"
    assert worse_loss.verdict("toy", "arm 0", 40, Rule()) == "refuted"


def test_a_half_value_near_the_end_refutes() -> None:
    near = horizon([0.89] * 4, headroom=Headroom(largest=20_000.0, module="loud"))
    assert near.verdict("toy", "arm 0", 40, METRIC) == "refuted"
    assert near.verdict("toy", "arm 0", 40, Rule(Proof(max_half=math.inf), ("metric",))) == "proved"


def test_where_fp32_gains_too_little_nothing_is_proved() -> None:
    same = horizon([0.89] * 4)
    assert same.verdict("toy", "arm 0", 40, Rule(Proof(sensitivity=9.0))) == "proved"
    assert same.verdict("toy", "arm 0", 40, Rule(Proof(sensitivity=11.0))) == "insensitive"
    assert same.verdict("toy", "arm 0", 40, Rule(Proof(min_loss_gain=0.6), ("loss",))) == "insensitive"


def test_a_proof_of_what_is_worse_at_the_end_is_counted_as_false() -> None:
    lasting, lost = horizon([0.89] * 4, end=0.9), horizon([0.89] * 4, end=0.5)
    found = [count(h, h.arms(40), 40, METRIC) for h in (lasting, lost)]
    assert [(c.of("proved"), c.of("proved", good=False)) for c in found] == [(1, 0), (1, 1)]


def test_where_fp32_gained_too_little_the_next_length_counts() -> None:
    runs = [run for n in (80, END) for run in [*outcomes("fp32", n, [0.9] * 4), *outcomes("arm 0", n, [0.89] * 4)]]
    too_short = [*outcomes("fp32", 40, [0.1, 0.1, 0.1, 0.2]), *outcomes("arm 0", 40, [0.1, 0.1, 0.1, 0.2])]
    found = Horizon([*runs, *too_short], {"toy": Metric()})
    assert [lengthened(found, lengths, METRIC).of("proved") for lengths in ((40,), (40, 80))] == [0, 1]


def test_the_rank_correlation_is_that_of_the_order_at_the_end() -> None:
    same_order = horizon([0.9] * 4, [0.8] * 4, [0.7] * 4)
    turned = horizon([0.7] * 4, [0.8] * 4, [0.9] * 4)
    for found, expected in ((same_order, 1.0), (turned, -1.0)):
        assert correlation(found, found.arms(40), 40, "metric") == pytest.approx(expected)


@pytest.mark.parametrize("task", TASKS)
def test_every_policy_fits_its_network(task: str) -> None:
    model = TASKS[task]().model()
    for policy in policies_of(task).values():
        applied = apply_policy(model, policy)
        assert applied_policy(applied) is not None
        remove_policy(applied)
