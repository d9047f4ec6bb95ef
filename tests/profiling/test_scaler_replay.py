"""The replay against torch's own GradScaler: scale for scale, skip for skip."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from autoprec.policy import GradScalerSettings
from autoprec.profiling.scaler_replay import headroom_octaves, replay_scaler


def torchs_own(maxima: list[float], settings: GradScalerSettings) -> tuple[list[float], list[bool], float]:
    """Run the real scaler on a parameter whose FP32 gradient went through FP16, as a half backward gives it."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=1e-30)
    scaler = torch.amp.GradScaler("cpu", **settings.model_dump())
    scales, skipped, taken = [], [], []
    optimizer.register_step_post_hook(lambda *_: taken.append(True))
    for maximum in maxima:
        scale = scaler.scale(torch.ones(()))
        scales.append(float(scale))
        parameter.grad = (torch.tensor([maximum], dtype=torch.float32) * scale).half().float()
        taken.clear()
        scaler.step(optimizer)
        scaler.update()
        skipped.append(not taken)
    return scales, skipped, scaler.get_scale()


def random_case(seed: int) -> tuple[list[float], GradScalerSettings]:
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 40))
    maxima = 2.0 ** rng.uniform(-30, 20) * np.exp(rng.uniform(0, 4) * rng.standard_normal(count))
    maxima[rng.random(count) < 0.05] = rng.choice([math.inf, math.nan, 0.0])
    settings = GradScalerSettings(
        init_scale=float(rng.choice([65536.0, 2.0 ** rng.uniform(-20, 40), 3e38, 1e-44, 1000.0 / 3.0])),
        growth_factor=float(rng.choice([2.0, 1.5, rng.uniform(1.01, 4.0), 1e30])),
        backoff_factor=float(rng.choice([0.5, 0.4, rng.uniform(0.01, 0.99)])),
        growth_interval=int(rng.integers(1, 6)),
    )
    return maxima.tolist(), settings


def check(seed: int) -> None:
    maxima, settings = random_case(seed)
    replay = replay_scaler(maxima, settings)
    scales, skipped, final = torchs_own(maxima, settings)
    assert list(replay.scales) == scales, seed
    assert list(replay.skipped) == skipped, seed
    assert replay.final_scale == final, seed


def test_the_replay_is_torchs_grad_scaler_over_random_sequences() -> None:
    for seed in range(300):
        check(seed)


@pytest.mark.slow
def test_the_replay_is_torchs_grad_scaler_over_ten_thousand_random_sequences() -> None:
    for seed in range(300, 10_000):
        check(seed)


def test_growth_past_the_largest_fp32_keeps_the_scale_and_restarts_the_count() -> None:
    settings = GradScalerSettings(init_scale=2.0**127, growth_interval=2)
    replay = replay_scaler([0.0] * 5, settings)
    assert replay.scales == (2.0**127,) * 5
    assert list(replay.scales) == torchs_own([0.0] * 5, settings)[0]


def test_a_scale_of_zero_stays_zero() -> None:
    settings = GradScalerSettings(init_scale=1e-44, growth_interval=1)
    replay = replay_scaler([math.inf] * 8 + [1.0] * 4, settings)
    assert replay.scales[-1] == 0.0
    assert replay.final_scale == 0.0


def test_a_long_run_goes_through_the_maxima_again_and_sees_growth_that_a_short_trial_cannot() -> None:
    settings = GradScalerSettings(init_scale=1024.0, growth_interval=100)
    assert replay_scaler([1.0] * 20, settings).final_scale == 1024.0
    long = replay_scaler([1.0] * 20, settings, num_steps=2000)
    assert len(long.scales) == 2000
    assert max(long.scales) == 65536.0  # 65536 * 1.0 overflows, half of it does not
    assert sum(long.skipped) == 14
    assert long.mean_octave == pytest.approx(sum(map(math.log2, long.scales)) / 2000)


def test_headroom_counts_doublings_below_the_largest_half() -> None:
    assert headroom_octaves(1.0, 65504.0) == 0.0
    assert headroom_octaves(65504.0 / 8, 1.0) == 3.0
    assert headroom_octaves(0.0, 65536.0) is None
