"""Predicted time of a recorded step on a GPU: per operator the larger of computing and moving, plus a launch."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from autoprec.estimates.gpus import Gpu
from autoprec.estimates.operations import Operation
from autoprec.estimates.recording import StepRecording

__all__ = ["MUCH_PADDING", "RATIO_ERROR", "Roofline", "StepTime", "padding", "predict_time"]

RATIO_ERROR = 0.4
"""Largest relative error of a predicted ratio of mixed precision to FP32 or TF32 beside the published ones
(docs/estimates.md). Above .25, hence a predicted throughput never decides a recommendation alone."""

_ALIGNMENT = {"fp16": 8, "bf16": 8, "tf32": 4, "fp32": 1}
"""Tensor cores pad each dimension to 16 bytes (NVIDIA, "Deep Learning Performance: Matrix Multiplication", tensor core
requirements)."""
MUCH_PADDING = 4
"""From here on (few channels a group, as in depthwise convolutions) ordinary cores are considered too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """What a GPU reaches of its data sheet, and how FP32 products run.

    Attributes:
        compute_share: reachable share of the peak: 770 to 800 of 989 TFLOP/s were seen on one H200.
        bandwidth_share: reachable share of the bandwidth: 4.3 of 4.8 TB/s were seen on one H200.
        launch_seconds: cost of starting one kernel from eager PyTorch; assumed, not measured.
        tf32: FP32 products and convolutions use TF32 where the GPU has it.
    """

    compute_share: float = 0.8
    bandwidth_share: float = 0.9
    launch_seconds: float = 5e-6
    tf32: bool = True

    def seconds(self, operation: Operation, gpu: Gpu) -> float:
        """Return the time of one run of the operator, its launches included.

        Products that tensor cores would pad much (depthwise convolutions) run on ordinary cores where that is faster.
        """
        bandwidth = gpu.bandwidth_gb_per_second * 1e9 * self.bandwidth_share
        moving = operation.num_bytes / bandwidth
        launching = operation.num_launches * self.launch_seconds
        precision = self._precision(operation.dtype, gpu)
        factor = padding(operation.dims, _ALIGNMENT[precision])
        ordinary = max(moving, self._products(operation.flops, gpu, "fp32"))
        if not operation.flops or precision == "fp32":
            return ordinary + launching
        relayout = operation.layout_bytes / bandwidth
        padded = max(moving, self._products(operation.flops * factor, gpu, precision)) + relayout
        return (min(padded, ordinary) if factor >= MUCH_PADDING else padded) + launching

    def _products(self, flops: float, gpu: Gpu, precision: str) -> float:
        return flops / (_peak(gpu, precision) * 1e12 * self.compute_share)

    def _precision(self, dtype: torch.dtype | None, gpu: Gpu) -> str:
        if dtype is torch.float16:
            return "fp16"
        if dtype is torch.bfloat16 and gpu.native_bf16:
            return "bf16"
        if dtype is torch.float32 and self.tf32 and gpu.tf32_tflops is not None:
            return "tf32"
        return "fp32"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Predicted time of one optimizer step.

    Attributes:
        step_seconds: the sum of the next mapping.
        seconds_by_unit: module name -> seconds of its forward and backward, launches included.
        seconds_by_phase: "forward", "backward", "optimizer" -> seconds.
        launch_share: the part of the step that is launch cost; near 1 no precision helps.
    """

    step_seconds: float
    seconds_by_unit: Mapping[str, float]
    seconds_by_phase: Mapping[str, float]
    launch_share: float


def predict_time(recording: StepRecording, gpu: Gpu, *, roofline: Roofline | None = None) -> StepTime:
    """Add up the operators of a recorded step on `gpu`; eager mode, nothing fused, nothing overlapped."""
    roofline = roofline or Roofline()
    by_unit: dict[str, float] = defaultdict(float)
    by_phase: dict[str, float] = defaultdict(float)
    launches = 0
    for operation in recording.operations:
        seconds = operation.repeats * roofline.seconds(operation, gpu)
        by_unit[operation.unit] += seconds
        by_phase[operation.phase] += seconds
        launches += operation.repeats * operation.num_launches
    total = math.fsum(by_phase.values())
    return StepTime(
        step_seconds=total,
        seconds_by_unit=MappingProxyType(dict(by_unit)),
        seconds_by_phase=MappingProxyType(dict(by_phase)),
        launch_share=launches * roofline.launch_seconds / total if total else 0.0,
    )


def _peak(gpu: Gpu, precision: str) -> float:
    peaks = {"fp16": gpu.fp16_tflops, "bf16": gpu.bf16_tflops, "tf32": gpu.tf32_tflops, "fp32": gpu.fp32_tflops}
    return peaks[precision] or gpu.fp32_tflops


def padding(dims: tuple[int, ...], alignment: int) -> float:
    """Return how many times the work of a product tensor cores do when each size is padded to `alignment`."""
    return math.prod(math.ceil(size / alignment) * alignment / size for size in dims)
