"""What is recorded of ranges, against hand-computed octaves and errors."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from autoprec.probes.ranges import ExponentHistogram, watch_ranges


def test_values_are_counted_by_octave() -> None:
    histogram = ExponentHistogram.of(torch.tensor([0.0, 1.0, 1.9, -2.0, 0.25, math.inf, math.nan]))
    assert histogram.counts == {-2: 1, 0: 2, 1: 1}
    assert histogram.num_zeros == 1
    assert histogram.num_non_finite == 2
    assert histogram.maximum == 2.0


def test_shares_are_those_that_fp16_really_loses() -> None:
    values = torch.tensor([1.5 * 2.0**e for e in range(-40, 20)])
    histogram = ExponentHistogram.of(values)
    for scale in (1.0, 1024.0, 65536.0):
        half = (values * scale).half()
        assert histogram.share_below(scale) == float((half == 0).sum()) / len(values)
        assert histogram.share_above(scale) == float(torch.isinf(half).sum()) / len(values)


def test_the_sum_of_histograms_is_that_of_all_values() -> None:
    first, second = torch.randn(100), torch.randn(50) * 1e-3
    both = ExponentHistogram.of(torch.cat([first, second]))
    assert ExponentHistogram.of(first) + ExponentHistogram.of(second) == both


def test_a_large_tensor_is_sampled_but_its_maximum_is_exact() -> None:
    values = torch.ones(100_000)
    values[7] = 12345.0
    histogram = ExponentHistogram.of(values)
    assert histogram.maximum == 12345.0
    assert histogram.num_values < 40_000


def test_an_empty_tensor_has_an_empty_histogram() -> None:
    assert ExponentHistogram.of(torch.zeros(0)) == ExponentHistogram()


def two_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))


def test_outputs_gradients_and_parameter_gradients_of_each_unit_are_seen() -> None:
    model = two_layers()
    x = torch.randn(5, 4)
    with watch_ranges(model, ["0", "1"]) as log:
        hidden = model[0](x)
        output = model[1](hidden)
        output.sum().backward()
    assert log["0"].activations == ExponentHistogram.of(hidden)
    assert log["1"].activation_gradients == ExponentHistogram.of(torch.ones(5, 2))
    expected = ExponentHistogram.of(model[0].weight.grad) + ExponentHistogram.of(model[0].bias.grad)
    assert log["0"].parameter_gradients == expected
    assert log["0"].output_shape == (5, 3)


def test_the_error_is_the_rounded_units_difference_weighed_by_the_gradient() -> None:
    model = two_layers()
    x = torch.randn(5, 4)
    with watch_ranges(model, ["1"]) as log:
        hidden = model[0](x)
        (3.0 * model[1](hidden)).sum().backward()
    half = hidden.half().float() @ model[1].weight.half().float().T + model[1].bias.half().float()
    difference = (half.half().float() - model[1](hidden)).detach()
    assert log["1"].half["fp16"].forward_error == pytest.approx(float((3.0 * difference).square().sum()), rel=1e-3)
    assert log["1"].half["fp16"].gradient_error == 0.0  # 3 * 65536 overflows, which is the grad scaler's to answer


@pytest.mark.parametrize(("scale", "lost"), [(1.0, 0.3 - float(torch.tensor(0.3).half())), (2.0**-24, 0.3)])
def test_the_gradients_part_is_what_its_rounding_at_the_scale_loses(scale: float, lost: float) -> None:
    model = two_layers()
    with watch_ranges(model, ["1"], scale=scale) as log:
        output = model(torch.randn(5, 4))
        (0.3 * output).sum().backward()
    assert log["1"].half["fp16"].gradient_error == pytest.approx(
        float((lost * output.detach()).square().sum()), rel=1e-3
    )


def test_a_unit_whose_output_overflows_in_half_is_found_though_fp32_is_finite() -> None:
    model = nn.Sequential(nn.Linear(64, 1, bias=False), nn.Linear(1, 1))
    with torch.no_grad():
        model[0].weight.fill_(60.0)
        model[1].weight.fill_(1e-4)
    with watch_ranges(model, ["0", "1"]) as log:
        model(torch.full((2, 64), 60.0)).sum().backward()
    assert log["0"].half["fp16"].overflows
    assert log["0"].activations.maximum == 64 * 3600.0
    assert log["1"].half["fp16"].overflows  # what it would be given in half does not fit
    assert log["1"].activations.maximum < 100


def test_watching_leaves_no_trace_and_changes_no_number() -> None:
    def build() -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(
            nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.ReLU(inplace=True), nn.Linear(8, 2)
        )

    plain, watched = build(), build()
    x = torch.randn(6, 4)
    torch.manual_seed(2)
    plain(x).square().sum().backward()
    torch.manual_seed(2)
    with watch_ranges(watched, ["0", "1", "2", "3", "4"]):
        watched(x).square().sum().backward()
    for (name, a), (_, b) in zip(plain.named_parameters(), watched.named_parameters(), strict=True):
        assert torch.equal(a.grad, b.grad), name
    for (name, a), (_, b) in zip(plain.named_buffers(), watched.named_buffers(), strict=True):
        assert torch.equal(a, b), name
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in watched.modules())
