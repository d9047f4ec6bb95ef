"""The largest batch in a memory budget: found by estimates, scaled where numbers were measured, kept in the study."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from toys import FakeMeasure, tiny_plan

from autoprec.policy import Kind, Number, Policy
from autoprec.report.front import front_table
from autoprec.search import budget
from autoprec.search.budget import fit_batch
from autoprec.search.front import read_front
from autoprec.search.pipeline import run_search
from autoprec.search.worth import Candidate
from autoprec.trials.outcome import Outcome

FIXED, PER_SAMPLE = 100.0, 10.0


def estimate(policy: Policy, batch_size: int | None, *, kind: Kind = "computed") -> Any:
    """A step of 100 bytes and 10 a sample, whose throughput grows with the batch; 8 samples at the target."""
    size = 8 if batch_size is None else batch_size
    peak = Number(value=FIXED + PER_SAMPLE * size, kind=kind)
    throughput = Number(value=100.0 + size, kind="predicted")
    return SimpleNamespace(peak_memory_bytes=peak, throughput_samples_per_second=throughput, num_samples=size)


def candidate(peak: float, throughput: float, kind: Kind) -> Candidate:
    outcome = Outcome(
        kind="ok",
        peak_memory_bytes=Number(value=peak, kind=kind),
        throughput_samples_per_second=Number(value=throughput, kind=kind),
    )
    return Candidate("a", Policy(default="fp32"), "key", outcome)


@pytest.mark.parametrize(
    ("limit", "size"), [(109.0, 0), (110.0, 1), (259.0, 15), (260.0, 16), (1e4, 990)], ids=lambda value: f"{value:g}"
)
def test_the_largest_batch_fits_and_one_more_sample_does_not(limit: float, size: int) -> None:
    found = fit_batch(candidate(180.0, 108.0, "computed"), estimate, budget_bytes=limit)
    assert found is not None
    assert found.batch_size == size
    if size:
        assert found.peak_memory_bytes == Number(value=FIXED + PER_SAMPLE * size, kind="computed")
        assert found.throughput_samples_per_second == Number(value=100.0 + size, kind="predicted")


def test_estimates_are_scaled_to_what_was_measured_at_the_target() -> None:
    found = fit_batch(candidate(360.0, 216.0, "measured"), estimate, budget_bytes=520.0)
    assert found is not None
    assert found.batch_size == 16
    assert found.peak_memory_bytes == Number(value=520.0, kind="predicted")
    assert found.throughput_samples_per_second == Number(value=232.0, kind="predicted")


def test_a_step_that_cannot_be_computed_has_no_largest_batch() -> None:
    def measured(policy: Policy, batch_size: int | None) -> Any:
        return estimate(policy, batch_size, kind="measured")

    assert fit_batch(candidate(180.0, 108.0, "computed"), measured, budget_bytes=1e4) is None


def test_a_search_with_a_budget_tells_the_largest_batch_of_each_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        budget, "TargetEstimator", lambda task, trial: lambda policy, batch_size: estimate(policy, batch_size)
    )
    result = run_search(tiny_plan(tmp_path, n_trials=3, memory_budget_bytes=2.0**30), FakeMeasure(noise=0.001))
    front = read_front(result.folder / "front.json")
    assert front.memory_budget_bytes == 2.0**30
    found = {member.name: member.largest_batch for member in front.front}
    assert found["fp32"] is not None
    assert found["fp32"].batch_size == 9  # 1e9 bytes at 8 samples stand for 180
    assert found["autocast fp16"] is not None
    assert found["autocast fp16"].batch_size == 22  # 0.6e9 bytes do
    headers = [column.header for column in front_table(front).columns]
    assert "largest batch in 1.00 GiB" in headers
    assert any(name.startswith("autoprec:budget:1073741824:") for name in result.study.user_attrs)
