"""A profile of a small training: what it covers, what it teaches, and its file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from autoprec.errors import StudyError
from autoprec.policy import GradScalerSettings
from autoprec.probes.ranges import ExponentHistogram
from autoprec.profiling.profile import PrecisionCost, Profile, UnitProfile
from autoprec.profiling.run import profile_as_json, take_profile
from autoprec.profiling.scaler_choice import choose_scaler, judge_scaler, scale_window, whole_maxima
from autoprec.search.decision import Decision
from autoprec.search.parameters import build_parameters
from autoprec.search.profile_prior import learn_from_profile, unit_figures
from autoprec.search.space import load_space
from autoprec.tasks.protocol import Task
from autoprec.trials.outcome import TrialSettings

NAMES = ["big", "mid", "norm", "head"]


class Planted(nn.Module):
    """`big` gives about 1e6, so that it overflows FP16; all else is harmless."""

    def __init__(self) -> None:
        super().__init__()
        self.big, self.mid, self.norm, self.head = (
            nn.Linear(16, 16),
            nn.Linear(16, 16),
            nn.LayerNorm(16),
            nn.Linear(16, 4),
        )
        with torch.no_grad():
            self.big.weight.mul_(1e6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(torch.relu(self.mid(self.big(x) * 1e-6))))


def planted_task() -> Task:
    def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        generator = torch.Generator().manual_seed(3)
        for scale in (1.0, 1.0, 5.0, 1.0, 1.0):
            yield scale * torch.randn(8, 16, generator=generator), torch.randint(0, 4, (8,), generator=generator)

    def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    return Task(name="planted", model=Planted, train_batches=batches, eval_batches=batches, loss=loss)


@pytest.fixture(scope="module")
def profile() -> Profile:
    return take_profile(planted_task(), NAMES, TrialSettings(seed=0), study_name="planted-1")


def test_it_covers_the_first_step_and_the_hardest_batch_after_some_training(profile: Profile) -> None:
    assert profile.num_steps == 5
    assert profile.watched_steps == [1, 5]
    assert len(profile.losses) == len(profile.gradient_maxima) == 5
    assert all(maximum > 0 for maximum in profile.gradient_maxima)


def test_the_same_settings_give_the_same_profile(profile: Profile) -> None:
    again = take_profile(planted_task(), NAMES, TrialSettings(seed=0), study_name="planted-1")
    assert again.model_copy(update={"wall_seconds": profile.wall_seconds}) == profile


def test_it_tells_the_unit_that_overflows_from_the_harmless_ones(profile: Profile) -> None:
    assert profile.units["big"].overflows
    assert profile.units["big"].headroom_octaves < -3
    for name in ("mid", "norm", "head"):
        assert not profile.units[name].overflows
        assert profile.units[name].headroom_octaves > 5
        assert 0 < profile.units[name].error_score() < 0.1


def test_costs_are_those_of_the_estimates_in_each_precision(profile: Profile) -> None:
    for precision in ("fp32", "autocast", "fp16"):
        parts = sum(unit.costs[precision].seconds for unit in profile.units.values())
        assert 0 < parts <= profile.step_seconds[precision]
    assert profile.units["mid"].cast_seconds > 0
    assert profile.units["mid"].output_elements == 8 * 16


def test_its_file_is_strict_json_and_comes_back_equal(profile: Profile, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    profile.save(path)
    assert Profile.load(path) == profile
    json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(name))
    assert [p.name for p in tmp_path.iterdir()] == ["profile.json"]
    path.write_text(path.read_text()[:100])
    with pytest.raises(StudyError, match=r"profile\.json: cannot be read as a profile"):
        Profile.load(path)


def test_what_a_worker_sends_is_the_same_profile(profile: Profile) -> None:
    sent = profile_as_json(planted_task(), NAMES, TrialSettings(seed=0).model_dump(mode="json"), "planted-1")
    received = Profile.model_validate(json.loads(json.dumps(sent, allow_nan=False)))
    assert received.units == profile.units


def learn(profile: Profile):
    space = load_space("default")
    kinds = {"big": "Linear", "mid": "Linear", "norm": "LayerNorm", "head": "Linear"}
    decisions = [Decision(name, {name: kinds[name]}, ("fp32", "autocast", "fp16")) for name in NAMES]
    parameters = build_parameters(decisions, space, optimizer_defaults={}, native_bf16=False)
    return learn_from_profile(profile, parameters, NAMES, max_loss_gap=0.5)


def test_the_unit_that_overflows_is_pinned_with_its_reason_and_no_harmless_one_to_fp32(profile: Profile) -> None:
    lessons = learn(profile)
    assert {name for name, choice in lessons.prior.pinned.items() if choice == "fp32"} == {"precision/big"}
    assert lessons.reasons["big"].startswith("overflows FP16: activations of big reach")


def test_the_prior_knows_order_borders_and_choices_that_are_one(profile: Profile) -> None:
    prior = learn(profile).prior
    assert prior.order == tuple(f"precision/{name}" for name in NAMES)
    assert ("precision/big", "precision/mid") in prior.borders
    assert prior.equal["precision/mid", "fp16"] == "autocast"
    assert ("precision/norm", "fp16") not in prior.equal
    assert prior.flows["precision/norm", "autocast"] == "fp32"
    assert prior.failures["precision/norm", "autocast"] < 0.01
    assert prior.failures["precision/big", "fp16"] > 0.9


def test_evidence_of_a_unit_carries_the_kind_of_each_number(profile: Profile) -> None:
    figures = unit_figures(profile, "mid", "fp16", 65536.0)
    assert figures["headroom_octaves"] == profile.units["mid"].headroom_octaves
    assert figures["saved_bytes"].kind == "computed"
    assert figures["saved_seconds"].kind == "predicted"
    assert unit_figures(profile, "unknown", "fp16", 65536.0) == {}


def with_gradients(maximum_octave: int, maxima: list[float]) -> Profile:
    counts = dict.fromkeys(range(maximum_octave - 20, maximum_octave + 1), 100)
    unit = UnitProfile(activation_gradients=ExponentHistogram(counts=counts, maximum=2.0**maximum_octave))
    return Profile(
        num_steps=len(maxima),
        watched_steps=[1],
        losses=[1.0] * len(maxima),
        gradient_maxima=maxima,
        units={"u": unit.model_copy(update={"costs": {"fp32": PrecisionCost(seconds=1.0, peak_bytes=1.0)}})},
    )


def test_the_window_ends_one_octave_below_overflow_and_begins_where_nothing_more_is_flushed() -> None:
    window = scale_window(with_gradients(-3, [0.125]).gradients)
    assert window.high == 2.0**17  # 0.125 * 2**18 = 32768, one doubling below 65504
    assert window.low == 2.0**-2  # the smallest octave is 2**-23
    assert window.headroom_octaves == pytest.approx(3.0, abs=0.01)
    assert window.holds(65536.0)


@pytest.mark.parametrize(
    ("choices", "expected"),
    [
        ([64.0, 256.0, 1024.0, 65536.0], 256.0),
        ([1024.0, 65536.0], 1024.0),
        ([2.0**-30, 2.0**-20], 2.0**-20),
    ],
    ids=["the largest inside the window", "the nearest above it", "the nearest below it"],
)
def test_a_default_that_overflows_gives_way_to_the_choice_nearest_to_the_window(
    choices: list[float], expected: float
) -> None:
    profile = with_gradients(6, [60.0])  # 64 * 2**9 = 32768: one doubling below 65504 is 2**8
    assert scale_window(profile.gradients).high == 2.0**8
    assert choose_scaler(profile, {"init_scale": choices}).init_scale == expected


def test_torchs_defaults_stay_where_they_are_in_the_window_and_nothing_is_clearly_better() -> None:
    choices = {"init_scale": [1024.0, 65536.0], "growth_factor": [1.5, 2.0], "growth_interval": [500, 2000]}
    chosen = choose_scaler(with_gradients(-10, [2.0**-10] * 4), choices)
    assert chosen == GradScalerSettings()


def test_a_scale_that_overflows_is_left_for_the_largest_safe_one() -> None:
    chosen = choose_scaler(with_gradients(6, [64.0] * 4), {"init_scale": [64.0, 256.0, 1024.0, 65536.0]})
    assert chosen.init_scale == 256.0  # 64 * 256 = 16384; 1024 would overflow


def test_growth_that_a_short_trial_never_sees_is_judged_over_a_long_run() -> None:
    profile = with_gradients(6, [64.0] * 4)
    maxima, gradients = whole_maxima(profile), profile.gradients
    eager = GradScalerSettings(init_scale=256.0, growth_interval=2)
    assert judge_scaler(maxima, gradients, eager, num_steps=4) < 0.3
    assert judge_scaler(maxima, gradients, eager, num_steps=2000) > 0.3
    assert judge_scaler(maxima, gradients, GradScalerSettings(init_scale=256.0), num_steps=2000) < 0.01
