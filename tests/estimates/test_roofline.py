from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autoprec.estimates import (
    RATIO_ERROR,
    Gpu,
    Roofline,
    StepSettings,
    estimate_step,
    gpu_by_name,
    predict_time,
    record_step,
    throughput_ratio_interval,
)
from autoprec.estimates.operations import Operation, describe_operation
from autoprec.policy import Policy

V100, A100 = gpu_by_name("v100"), gpu_by_name("a100")


def product(dtype: torch.dtype | None, *, flops: int = 10**12, num_bytes: float = 0, **more: Any) -> Operation:
    return Operation("aten.mm", "", "forward", dtype, flops, num_bytes, **more)


@pytest.mark.parametrize(
    ("dtype", "gpu", "tf32", "tflops"),
    [
        (torch.float32, V100, True, 15.7 * 0.94),
        (torch.float16, V100, True, 125.0 * 0.77),
        (torch.bfloat16, V100, True, 15.7 * 0.94),
        (torch.float32, A100, True, 156.0 * 0.64),
        (torch.float32, A100, False, 19.5 * 0.94),
        (torch.bfloat16, A100, False, 312.0 * 0.77),
    ],
)
def test_a_product_runs_at_the_reachable_peak_of_its_dtype(
    dtype: torch.dtype, gpu: Gpu, tf32: bool, tflops: float
) -> None:
    roofline = Roofline(tf32=tf32, launch_seconds=0.0)
    assert roofline.seconds(product(dtype), gpu) == pytest.approx(1 / tflops)


@pytest.mark.parametrize(
    ("gpu", "dtype", "tflops"),
    [
        ("a100", torch.float16, 312.0 * 0.36),
        ("h100", torch.bfloat16, 989.4 * 0.36),
        ("rtx-3090", torch.float16, 71.0 * 0.85),
        ("a100", torch.float32, 156.0 * 0.55),
        ("v100", torch.float32, 15.7 * 0.73),
    ],
)
def test_convolutions_reach_less_of_tensor_cores_that_outrun_the_memory(
    gpu: str, dtype: torch.dtype, tflops: float
) -> None:
    seconds = Roofline(launch_seconds=0.0).seconds(product(dtype, kind="convolution"), gpu_by_name(gpu))
    assert seconds == pytest.approx(1 / tflops)


def test_computing_moving_and_launches_add_up() -> None:
    operation = product(torch.float32, flops=10**9, num_bytes=9e8, num_launches=3)
    expected = 1e9 / (15.7e12 * 0.94) + 9e8 / (900e9 * 0.93) + 3 * 5e-6
    assert Roofline().seconds(operation, V100) == pytest.approx(expected)


def test_tensor_cores_pad_sizes_and_turn_contiguous_images() -> None:
    roofline = Roofline(launch_seconds=0.0)
    padded = product(torch.float16, dims=(64, 3))
    assert roofline.seconds(padded, V100) == pytest.approx(1 / 96.25 * 8 / 3)
    turned = product(torch.float16, layout_bytes=9 * 10**8)
    assert roofline.seconds(turned, V100) == pytest.approx(1 / 96.25 + 9e8 / 837e9)
    assert roofline.seconds(product(torch.float32, layout_bytes=9 * 10**8), V100) == pytest.approx(1 / (15.7 * 0.94))


def test_a_number_of_groups_without_fast_kernels_is_slow_in_channels_last() -> None:
    """RegNetX-032 under autocast takes 2.5 times as long in channels_last on an RTX 3090, ResNeXt-50 two thirds."""
    roofline, gpu = Roofline(launch_seconds=0.0), gpu_by_name("rtx-3090")

    def seconds(groups: int, **more: Any) -> float:
        grouped = product(torch.float16, dims=(8, 8), groups=groups, kind="grouped convolution", **more)
        return roofline.seconds(grouped, gpu)

    assert seconds(9, channels_last=True) > 2 * seconds(9)
    assert seconds(32, channels_last=True) < seconds(32)


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("transposed", [False, True])
def test_convolutions_count_two_operations_a_product_with_groups(groups: int, transposed: bool) -> None:
    layer = (nn.ConvTranspose2d if transposed else nn.Conv2d)(8, 16, 3, groups=groups, bias=False)
    x = torch.zeros(2, 8, 10, 10)
    out = layer(x)
    positions = x if transposed else out
    per_position = 3 * 3 * (16 if transposed else 8) // groups
    args = (x, layer.weight, None, [1, 1], [0, 0], [1, 1], transposed, [0, 0], groups)
    operation = describe_operation(torch.ops.aten.convolution.default, args, {}, out)
    assert operation.flops == 2 * positions.numel() * per_position
    back_args = (out, x, layer.weight, None, [1, 1], [0, 0], [1, 1], transposed, [0, 0], groups, [False, True, False])
    result = (None, layer.weight, None)
    backward = describe_operation(torch.ops.aten.convolution_backward.default, back_args, {}, result)
    assert backward.flops == operation.flops


def test_bytes_are_those_read_and_written() -> None:
    a, b = torch.zeros(4, 8), torch.zeros(8, 2)
    operation = describe_operation(torch.ops.aten.mm.default, (a, b), {}, a @ b)
    assert operation.num_bytes == 4 * (32 + 16 + 8)
    assert operation.flops == 2 * 4 * 8 * 2
    expanded = torch.zeros(1, 8).expand(100, 8)
    added = describe_operation(torch.ops.aten.add.Tensor, (expanded, 1.0), {}, torch.zeros(100, 8))
    assert added.num_bytes == 4 * (8 + 800)


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.small, self.large = nn.Linear(16, 32), nn.Linear(32, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.large(self.small(x))


def regression(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def regression_batch(num_samples: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(num_samples, 16), torch.zeros(num_samples, 256)


def test_operators_belong_to_the_module_that_runs_forward_and_backward() -> None:
    recording = record_step(TwoLayers(), regression_batch(), regression)
    flops: dict[tuple[str, str], int] = {}
    for operation in recording.operations:
        flops[operation.unit, operation.phase] = flops.get((operation.unit, operation.phase), 0) + operation.flops
    small, large = 2 * 64 * 16 * 32, 2 * 64 * 32 * 256
    assert flops["small", "forward"] == small
    assert flops["large", "forward"] == large
    assert flops["small", "backward"] == small  # the batch needs no gradient
    assert flops["large", "backward"] == 2 * large


def test_seconds_by_unit_and_by_phase_add_up_to_the_step() -> None:
    time = predict_time(record_step(TwoLayers(), regression_batch(), regression), A100)
    assert sum(time.seconds_by_unit.values()) == pytest.approx(time.step_seconds)
    assert sum(time.seconds_by_phase.values()) == pytest.approx(time.step_seconds)
    assert set(time.seconds_by_phase) == {"forward", "backward", "optimizer"}


def test_accumulation_repeats_the_micro_batch_and_steps_once() -> None:
    def total(accumulation_steps: int, phase: str) -> int:
        settings = StepSettings(accumulation_steps=accumulation_steps)
        recording = record_step(TwoLayers(), regression_batch(), regression, settings=settings)
        return sum(
            o.repeats * (o.flops if phase != "optimizer" else 1) for o in recording.operations if o.phase == phase
        )

    assert total(5, "forward") == 5 * total(1, "forward")
    assert total(5, "backward") == 5 * total(1, "backward")
    assert total(5, "optimizer") == total(1, "optimizer")


def test_a_tiny_step_is_bound_by_launches_and_gains_nothing_from_autocast() -> None:
    base, amp = (
        estimate_step(TwoLayers(), regression_batch(4), regression, policy=Policy(default=default))
        for default in ("fp32", "autocast")
    )
    assert base.launch_share == 1.0
    assert amp.throughput_samples_per_second.value < base.throughput_samples_per_second.value


def test_a_large_step_is_faster_under_autocast_and_throughput_counts_samples() -> None:
    model = nn.Sequential(nn.Linear(4096, 4096), nn.Linear(4096, 4096))

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch).sum()

    base, amp = (
        estimate_step(model, torch.zeros(2, 4096), loss, policy=Policy(default=default), batch_size=8192, gpu="v100")
        for default in ("fp32", "autocast")
    )
    assert base.num_samples == 8192
    assert base.throughput_samples_per_second.value == pytest.approx(8192 / base.step_seconds.value)
    assert base.throughput_samples_per_second.kind == "predicted"
    assert 3 < base.step_seconds.value / amp.step_seconds.value < 8


def test_channels_last_saves_the_turning_of_images_under_autocast() -> None:
    model = nn.Sequential(nn.Conv2d(64, 64, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.Conv2d(64, 64, 3))
    images = torch.zeros(32, 64, 56, 56)

    def turned(model: nn.Module, images: torch.Tensor) -> float:
        settings = StepSettings(policy=Policy(default="autocast"))
        recording = record_step(model, images, lambda model, batch: model(batch).sum(), settings=settings)
        return sum(operation.layout_bytes for operation in recording.operations)

    assert turned(model, images) > 0
    assert turned(model.to(memory_format=torch.channels_last), images.to(memory_format=torch.channels_last)) == 0


@pytest.mark.parametrize(
    ("layer", "shape"),
    [(nn.Conv1d(64, 64, 3), (8, 64, 256)), (nn.Conv3d(64, 64, 3), (2, 64, 8, 8, 8))],
    ids=["1-D", "3-D"],
)
def test_convolutions_of_one_and_three_dimensions_turn_their_layout_too(
    layer: nn.Module, shape: tuple[int, ...]
) -> None:
    settings = StepSettings(policy=Policy(default="autocast"))
    recording = record_step(layer, torch.zeros(shape), lambda model, batch: model(batch).sum(), settings=settings)
    assert sum(operation.layout_bytes for operation in recording.operations) > 0


def test_operators_are_told_apart_by_kind() -> None:
    model = nn.Sequential(
        nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 3, groups=2), nn.Conv2d(8, 8, 3, groups=8), nn.BatchNorm2d(8), nn.ReLU()
    )
    recording = record_step(model, torch.zeros(2, 8, 12, 12), lambda model, batch: model(batch).sum())
    kinds = {operation.unit: operation.kind for operation in recording.operations if operation.phase == "forward"}
    assert [kinds[str(index)] for index in range(5)] == [
        "convolution", "grouped convolution", "depthwise convolution", "norm", "elementwise",
    ]  # fmt: skip
    assert {operation.kind for operation in recording.operations if operation.phase == "optimizer"} == {"optimizer"}


def test_bf16_on_a_gpu_without_it_is_noted() -> None:
    policy = Policy(default="autocast", dtype="bf16")
    estimate = estimate_step(TwoLayers(), regression_batch(), regression, policy=policy, gpu="t4")
    assert any("no BF16 units" in note for note in estimate.notes)


def test_dropout_costs_one_kernel_each_way_with_a_mask_of_bytes() -> None:
    model = nn.Sequential(nn.Linear(16, 1024), nn.Dropout(0.5), nn.Linear(1024, 256))
    recording = record_step(model, regression_batch(), regression)
    in_dropout = [operation for operation in recording.operations if operation.unit == "1"]
    forward = [operation for operation in in_dropout if operation.phase == "forward"]
    assert [operation.num_bytes for operation in forward] == [64 * 1024 * (4 + 4 + 1)]
    assert 64 * 1024 * (4 + 4 + 1) in [operation.num_bytes for operation in in_dropout if operation.phase == "backward"]


@pytest.mark.parametrize("gpu", ["rtx-3090", "a10", "a100", "v100"])
def test_an_interval_holds_its_ratio_and_is_wider_where_predictions_are_worse(gpu: str) -> None:
    low, high = throughput_ratio_interval(2.0, gpu=gpu)
    assert low < 2.0 < high
    assert throughput_ratio_interval(2.0, gpu=gpu_by_name(gpu)) == (low, high)
    assert max(1 - low / 2, high / 2 - 1) <= RATIO_ERROR
    assert low >= throughput_ratio_interval(2.0, gpu="a100")[0] == pytest.approx(1.28)
