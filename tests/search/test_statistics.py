"""Intervals of paired differences against hand-computed values."""

from __future__ import annotations

import numpy as np
import pytest

from autoprec.search.statistics import interval


def test_three_pairs_against_the_t_table() -> None:
    found = interval([0.01, 0.02, 0.03], alpha=0.05)
    # mean .02, deviation .01, t(.95, 2 degrees of freedom) = 2.920
    assert found.mean == pytest.approx(0.02)
    assert found.half_width == pytest.approx(2.920 * 0.01 / 3**0.5, rel=1e-3)
    assert (found.low, found.high) == pytest.approx((0.02 - 0.016859, 0.02 + 0.016859), abs=1e-5)


def test_equal_differences_keep_the_uncertainty_of_the_metrics_steps() -> None:
    found = interval([0.0, 0.0, 0.0], alpha=0.05, resolution=1 / 360)
    assert found.half_width == pytest.approx(2.920 * (1 / 360) / 12**0.5 / 3**0.5, rel=1e-3)


def test_one_pair_has_no_spread() -> None:
    with pytest.raises(ValueError, match="1 values"):
        interval([0.1], alpha=0.05)


def test_the_lower_bound_lies_above_the_truth_as_often_as_alpha_says() -> None:
    rng = np.random.default_rng(0)
    misses = sum(interval(rng.normal(0, 1, 4).tolist(), alpha=0.05).low > 0 for _ in range(4000))
    assert misses / 4000 == pytest.approx(0.05, abs=0.012)
