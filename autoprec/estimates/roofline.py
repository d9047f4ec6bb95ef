"""Predicted time of a recorded step on a GPU: operators compute and move; the host may be slower than all of them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from autoprec.estimates.efficiencies import arithmetic_share, moving_share, narrow_share
from autoprec.estimates.gpus import Gpu
from autoprec.estimates.operations import Operation
from autoprec.estimates.recording import StepRecording

__all__ = ["MUCH_PADDING", "Roofline", "StepTime", "padding", "predict_time"]

_ALIGNMENT = {"fp16": 8, "bf16": 8, "tf32": 4, "fp32": 1}
"""Tensor cores pad each dimension to 16 bytes (NVIDIA, "Deep Learning Performance: Matrix Multiplication", tensor core
requirements)."""
MUCH_PADDING = 4
"""From here on (few channels a group, as in depthwise convolutions) ordinary cores are considered too."""
_HALF = ("fp16", "bf16")
_NARROW = ("grouped convolution", "depthwise convolution")


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """What a GPU and its host reach, and how FP32 products run.

    Attributes:
        bandwidth_share: reachable share of the bandwidth; convolutions have their own (`moving_share`). A copy on
            one H200 reached 4.3 of 4.8 TB/s, .9.
        launch_seconds: the GPU's own time between two kernels.
        host_seconds: what eager PyTorch takes to start one kernel. Like the two above fitted to published training
            steps; those of small networks took 33 to 57 us a kernel.
        tf32: FP32 products and convolutions use TF32 where the GPU has it.
    """

    bandwidth_share: float = 0.93
    launch_seconds: float = 5e-6
    host_seconds: float = 56e-6
    tf32: bool = True

    def seconds(self, operation: Operation, gpu: Gpu) -> float:
        """Return the GPU's time for one run of the operator: computing, moving and launches, one after the other.

        Kernels overlap the two only in part, so that their sum is nearer to what is measured than the larger of them.
        Products that tensor cores would pad much run on ordinary cores where that is faster.
        """
        bandwidth = gpu.bandwidth_gb_per_second * 1e9
        half = self._precision(operation.dtype, gpu) in _HALF
        share = moving_share(operation, half=half) or self.bandwidth_share
        moving = operation.num_bytes / (bandwidth * share)
        return moving + self._computing(operation, gpu) + operation.num_launches * self.launch_seconds

    def _computing(self, operation: Operation, gpu: Gpu) -> float:
        """Return the time of the products, with what turning contiguous images for the tensor cores moves."""
        if not operation.flops:
            return 0.0
        precision = self._precision(operation.dtype, gpu)
        if operation.kind in _NARROW:
            share = narrow_share(operation, half=precision in _HALF)
            return operation.flops / (gpu.fp32_tflops * 1e12 * share)
        ordinary = operation.flops / (gpu.fp32_tflops * 1e12 * arithmetic_share(operation, "fp32", gpu))
        if precision == "fp32":
            return ordinary
        factor = padding(operation.dims, _ALIGNMENT[precision])
        peak = _peak(gpu, precision) * 1e12 * arithmetic_share(operation, precision, gpu)
        turning = operation.layout_bytes / (gpu.bandwidth_gb_per_second * 1e9 * self.bandwidth_share)
        padded = operation.flops * factor / peak + turning
        return min(padded, ordinary) if factor >= MUCH_PADDING else padded

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
        step_seconds: the larger of the GPU's and the host's time; the sum of either of the next two.
        seconds_by_unit: module name -> seconds of its forward and backward.
        seconds_by_phase: "forward", "backward", "optimizer" -> seconds.
        launch_share: the host's time to start all kernels over the step's: 1 where the step is bound by launches,
            so that no precision makes it faster.
    """

    step_seconds: float
    seconds_by_unit: Mapping[str, float]
    seconds_by_phase: Mapping[str, float]
    launch_share: float


def predict_time(recording: StepRecording, gpu: Gpu, *, roofline: Roofline | None = None) -> StepTime:
    """Add up the operators of a recorded step on `gpu`; eager mode, nothing fused.

    The host runs ahead of the GPU within a step, so that the slower of the two decides the whole step; its seconds are
    told by unit and phase.
    """
    roofline = roofline or Roofline()
    on_gpu = [operation.repeats * roofline.seconds(operation, gpu) for operation in recording.operations]
    on_host = [operation.repeats * operation.num_launches * roofline.host_seconds for operation in recording.operations]
    total = max(math.fsum(on_gpu), math.fsum(on_host))
    bound_by_host = total > math.fsum(on_gpu)
    by_unit: dict[str, float] = defaultdict(float)
    by_phase: dict[str, float] = defaultdict(float)
    for operation, seconds in zip(recording.operations, on_host if bound_by_host else on_gpu, strict=True):
        by_unit[operation.unit] += seconds
        by_phase[operation.phase] += seconds
    return StepTime(
        step_seconds=total,
        seconds_by_unit=MappingProxyType(dict(by_unit)),
        seconds_by_phase=MappingProxyType(dict(by_phase)),
        launch_share=math.fsum(on_host) / total if total else 0.0,
    )


def _peak(gpu: Gpu, precision: str) -> float:
    peaks = {"fp16": gpu.fp16_tflops, "bf16": gpu.bf16_tflops, "tf32": gpu.tf32_tflops, "fp32": gpu.fp32_tflops}
    return peaks[precision] or gpu.fp32_tflops


def padding(dims: tuple[int, ...], alignment: int) -> float:
    """Return how many times the work of a product tensor cores do when each size is padded to `alignment`."""
    return math.prod(math.ceil(size / alignment) * alignment / size for size in dims)
