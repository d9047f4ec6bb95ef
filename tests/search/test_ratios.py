"""Ratios to FP32: kinds are never mixed, and an interval is claimed only where pairs were measured."""

from __future__ import annotations

import math

import pytest

from autoprec.policy import Kind, Number
from autoprec.search.ratios import counted, outcome_ratios, paired_ratios
from autoprec.trials.outcome import Outcome


def outcome(memory: float, throughput: float, kind: Kind = "measured") -> Outcome:
    return Outcome(
        kind="ok",
        peak_memory_bytes=Number(value=memory, kind=kind),
        throughput_samples_per_second=Number(value=throughput, kind=kind),
    )


def test_measured_pairs_give_a_geometric_mean_and_a_student_interval() -> None:
    runs = {0: outcome(5.0, 110.0), 1: outcome(5.0, 240.0), 2: outcome(5.0, 132.0)}
    reference = {0: outcome(10.0, 100.0), 1: outcome(10.0, 200.0), 2: outcome(10.0, 100.0)}
    found = paired_ratios(runs, reference).throughput
    logs = [math.log(1.1), math.log(1.2), math.log(1.32)]
    mean = sum(logs) / 3
    deviation = math.sqrt(sum((x - mean) ** 2 for x in logs) / 2)
    half_width = 4.302653 * deviation / math.sqrt(3)  # t(.975, 2 degrees of freedom)
    assert found is not None
    assert found.value == pytest.approx(math.exp(mean))
    assert (found.low, found.high) == pytest.approx((math.exp(mean - half_width), math.exp(mean + half_width)))


def test_computed_numbers_have_a_ratio_and_no_interval() -> None:
    found = paired_ratios({0: outcome(5.0, 1.0, "computed")} | {1: outcome(5.0, 1.0, "computed")}, REFERENCE).memory
    assert found == Number(value=0.5, kind="computed")


REFERENCE = {0: outcome(10.0, 1.0, "computed"), 1: outcome(10.0, 1.0, "computed")}


def test_numbers_of_different_kinds_have_no_ratio() -> None:
    assert outcome_ratios(outcome(5.0, 2.0), outcome(10.0, 1.0, "computed")).memory is None


@pytest.mark.parametrize(
    ("low", "high", "expected"), [(0.9, 1.2, 1.0), (1.1, 1.3, 1.1), (0.5, 0.7, 0.7)], ids=["noise", "more", "less"]
)
def test_a_ratio_counts_with_the_end_of_its_interval_nearest_to_one(low: float, high: float, expected: float) -> None:
    assert counted(Number(value=(low + high) / 2, kind="measured", low=low, high=high)) == expected


def test_a_ratio_without_an_interval_counts_as_it_is_and_a_missing_one_as_one() -> None:
    assert counted(Number(value=0.5, kind="computed")) == 0.5
    assert counted(None) == 1.0
