"""A profile of a small training: what it covers, what it teaches, and its file."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from autoprec import Policy, apply_policy, emulate
from autoprec.errors import StudyError
from autoprec.policy import GradScalerSettings
from autoprec.probes.ranges import ExponentHistogram, watch_ranges
from autoprec.profiling.profile import PrecisionCost, Profile, UnitProfile
from autoprec.profiling.run import profile_as_json, take_profile
from autoprec.profiling.scaler_choice import ScaleWindow, choose_scaler, judge_scaler, scale_window, whole_maxima
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


def test_of_two_scales_as_far_from_the_window_the_one_that_does_not_overflow_is_chosen() -> None:
    window = ScaleWindow(2.0**17, 2.0**17, 3.0)
    assert min([2.0**18, 2.0**16], key=window.distance) == 2.0**16
    assert min([2.0**19, 2.0**18], key=window.distance) == 2.0**18


@pytest.mark.parametrize("family", ["default", "cnn", "transformer"])
@pytest.mark.parametrize("octave", range(2, 18))
def test_the_spaces_offer_every_power_of_two_so_that_one_inside_the_window_is_chosen(family: str, octave: int) -> None:
    scaler = load_space(family).grad_scaler
    assert scaler is not None
    assert scaler.init_scale is not None
    choices = [float(choice) for choice in scaler.init_scale.choices or []]
    window = ScaleWindow(2.0**octave, 2.0**octave, 0.0)
    assert window.holds(min(choices, key=window.distance))


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


class RootMeanSquare(nn.Module):
    """A hand-written RMSNorm: the squares of values near 400 overflow FP16, its output is then 0 and finite."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class LargeNorm(nn.Linear):
    """Normalises large, nearly equal values: BF16 has steps of 16 between 2,048 and 4,096."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.layer_norm(super().forward(x) + 3000.0, (self.out_features,))


class LongSum(nn.Linear):
    """Sums 100,000 terms near 1 and takes the level off."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        terms = 1.0 + 1e-3 * super().forward(x)
        return (terms.unsqueeze(-1).expand(*terms.shape, 100_000).sum(-1) - 100_000) / 100


class FarPosition(nn.Linear):
    """Embeds a position past 512, of which BF16 knows every fourth."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(super().forward(x) + 512.0)


def rounded_task(harm: nn.Module, *, gain: float = 1.0) -> Task:
    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.norm, self.head = nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 4)
            self.harm = copy.deepcopy(harm)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.harm(gain * self.norm(self.first(x))))

    generator = torch.Generator().manual_seed(1)
    batches = [
        (torch.randn(32, 16, generator=generator), torch.randint(0, 4, (32,), generator=generator)) for _ in range(4)
    ]

    def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    return Task(name="rounded", model=Network, train_batches=batches, eval_batches=batches, loss=loss)


def lessons_in(dtype: str, profile: Profile):
    half = {"fp16": "fp16", "bf16": "bf16"}.get(dtype, "half")
    kinds = {"first": "Linear", "norm": "LayerNorm", "harm": "Harm", "head": "Linear"}
    decisions = [Decision(name, {name: kind}, ("fp32", "autocast", half)) for name, kind in kinds.items()]
    parameters = build_parameters(
        decisions, load_space("default"), optimizer_defaults={}, native_bf16=True, dtype=dtype
    )
    return learn_from_profile(profile, parameters, list(kinds), max_loss_gap=0.5)


def test_a_unit_that_overflows_inside_is_seen_though_its_ends_are_small() -> None:
    task = rounded_task(RootMeanSquare(16), gain=400.0)
    unit = take_profile(task, ["first", "norm", "harm", "head"], TrialSettings(seed=0)).units["harm"]
    assert not unit.half["fp16"].overflows
    assert unit.half["fp16"].output > 0.9
    assert unit.error_score("fp16") > 0.01
    assert unit.half["bf16"].output < 0.01


def test_what_a_unit_gives_in_the_profile_is_what_a_policy_gives_in_a_trial() -> None:
    module, x = RootMeanSquare(16), 400.0 * torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
    with watch_ranges(module, [""]) as log:
        exact = module(x)
        exact.sum().backward()
    for dtype in ("fp16", "bf16"):
        applied = apply_policy(RootMeanSquare(16), Policy(default=dtype, dtype=dtype))
        with emulate():
            found = applied(x).detach()
        lost = float((found - exact).detach().square().sum().sqrt() / exact.detach().square().sum().sqrt())
        assert log[""].half[dtype].output_error == pytest.approx(lost, rel=1e-6)


@pytest.mark.parametrize(
    "harm", [LargeNorm(16, 16), LongSum(16, 16), FarPosition(16, 16)], ids=lambda m: type(m).__name__
)
def test_what_bf16_rounds_away_is_pinned_to_fp32_with_its_reason_and_nothing_else(harm: nn.Module) -> None:
    profile = take_profile(rounded_task(harm), ["first", "norm", "harm", "head"], TrialSettings(seed=0))
    lessons = lessons_in("bf16", profile)
    assert {name for name, choice in lessons.prior.pinned.items() if choice == "fp32"} == {"precision/harm"}
    assert lessons.reasons["harm"].startswith("rounds in BF16: the output of harm is off by ")
    for name in ("first", "norm", "head"):
        assert profile.units[name].half["bf16"].output < 0.01
        assert profile.units[name].error_score("bf16") < 0.01


def test_where_both_dtypes_are_searched_each_has_its_own_pins() -> None:
    task = rounded_task(RootMeanSquare(16), gain=400.0)
    lessons = lessons_in("both", take_profile(task, ["first", "norm", "harm", "head"], TrialSettings(seed=0)))
    assert lessons.families["fp16"].pinned.get("precision/harm") == "fp32"
    assert "precision/harm" not in lessons.families["bf16"].pinned
    assert "precision/harm" not in lessons.prior.pinned
    assert lessons.families["bf16"].failures["precision/first", "half"] < 0.01


def test_a_bf16_study_knows_no_scaler_and_no_headroom(profile: Profile) -> None:
    assert not lessons_in("bf16", profile).fixed
    figures = unit_figures(profile, "mid", "bf16", 65536.0, "bf16")
    assert "headroom_octaves" not in figures
    assert "flushed_share" not in figures
    assert figures["error_score"] == profile.units["mid"].error_score("bf16")
