"""Units of different precisions side by side: who loses a choice, and what becomes one unit."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

from autoprec import Policy, apply_policy, emulate, remove_policy
from autoprec.units import Units, find_units


class MaskedAttention(nn.Module):
    """Masks by the largest number of its input's dtype: too large for scores that its layers made in another."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.query(x) @ self.key(x).mT
        mask = torch.ones_like(scores, dtype=torch.bool).triu(1)
        return scores.masked_fill(mask, torch.finfo(x.dtype).min).softmax(-1) @ x


class Spectrum(nn.Module):
    """Takes no half, as torch's FFT at most sizes does not."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype is torch.float16:
            raise NotImplementedError("Unsupported dtype Half")
        return x


class Block(nn.Module):
    def __init__(self, mixer: nn.Module) -> None:
        super().__init__()
        self.norm, self.mixer, self.linear = nn.LayerNorm(8), mixer, nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(self.mixer(self.norm(x)))


class Rooted(nn.Sequential):
    """The same fault in the code of the root, which is no unit."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self[0](x)
        return self[1](scores.masked_fill(scores > 0, torch.finfo(x.dtype).min))


def blocks(mixer: type[nn.Module]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(mixer()), Block(mixer()))


def units_of(model: nn.Module) -> Units:
    return find_units(model, lambda m: m(torch.randn(2, 4, 8)).sum())


def test_a_module_that_cannot_take_units_of_different_precisions_is_one_unit_in_every_block() -> None:
    units = {unit.name: unit for unit in units_of(blocks(MaskedAttention))}
    assert list(units) == [f"{n}.{part}" for n in (0, 1) for part in ("norm", "mixer", "linear")]
    for name in ("0.mixer", "1.mixer"):
        assert units[name].choices == ("fp32", "fp16", "bf16")
        assert "cannot be converted" in units[name].reasons["autocast"]
        assert (units[name].type, units[name].num_parameters) == ("MaskedAttention", 144)


def test_a_unit_that_fails_on_what_its_neighbour_hands_it_loses_the_choice_in_every_block() -> None:
    found = units_of(blocks(Spectrum))
    units = {unit.name: unit for unit in found}
    for name in ("0.mixer", "1.mixer"):
        assert "autocast" not in units[name].choices
        assert "Unsupported dtype Half" in units[name].reasons["autocast"]
    assert units["0.norm"].choices == units["1.linear"].choices == ("fp32", "autocast", "fp16", "bf16")


def test_what_the_root_does_between_units_is_left_to_the_trials() -> None:
    units = units_of(Rooted(nn.Linear(8, 8), nn.Linear(8, 8)))
    assert [unit.name for unit in units] == ["0", "1"]


@pytest.mark.parametrize("mixer", [MaskedAttention, Spectrum])
def test_every_mixture_of_the_choices_that_are_left_runs(mixer: type[nn.Module]) -> None:
    model = blocks(mixer)
    units = units_of(model)
    for seed in range(20):
        rng = random.Random(seed)
        choices = {unit.name: rng.choice([c for c in unit.choices if c != "bf16"]) for unit in units}
        with emulate():
            apply_policy(model, Policy(default="autocast", dtype="fp16", modules=choices))
            assert model(torch.randn(2, 4, 8)).isfinite().all()
            remove_policy(model)


def test_a_model_that_is_one_unit_is_tried_beside_nothing() -> None:
    units = find_units(nn.Linear(4, 2), lambda model: model(torch.randn(3, 4)))
    assert [unit.name for unit in units] == [""]
    assert set(units.units[0].choices) == {"fp32", "autocast", "fp16", "bf16"}
