"""What GPUs reach of their data sheets: a share of the peak and of the bandwidth for each kind of operator.

The shares are fitted to the tuning half of published training throughput (benchmarks/data/published.csv: eager PyTorch
with cuDNN and cuBLAS), no model of which is in the testing half. Start at `arithmetic_share`.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Literal

from autoprec.estimates.gpus import Gpu
from autoprec.estimates.operations import Operation

__all__ = ["FAST_GROUPS", "TensorCores", "arithmetic_share", "moving_share", "narrow_share", "tensor_cores"]

TensorCores = Literal["halved", "workstation", "data center"]

_CONVOLUTIONS = MappingProxyType({
    ("halved", "fp16"): 0.85,
    ("workstation", "fp16"): 0.55,
    ("data center", "fp16"): 0.36,
    ("halved", "tf32"): 0.9,
    ("workstation", "tf32"): 0.95,
    ("data center", "tf32"): 0.55,
    ("halved", "fp32"): 0.73,
    ("workstation", "fp32"): 0.73,
    ("data center", "fp32"): 0.73,
})  # fmt: skip
"""Dense convolutions, of the precision's own peak: the more it outruns ordinary cores, the less of it is reached."""

_PRODUCTS = MappingProxyType({"fp16": 0.77, "tf32": 0.64, "fp32": 0.94})
"""Matrix products and attention, of the precision's own peak."""

_NARROW = MappingProxyType({
    ("grouped", "fp32"): 0.5,
    ("grouped", "half, contiguous"): 0.19,
    ("grouped", "half, channels_last"): 1.5,
    ("grouped", "half, channels_last, other groups"): 0.04,
    ("depthwise", "fp32"): 0.3,
    ("depthwise", "half, contiguous"): 0.33,
    ("depthwise", "half, channels_last"): 0.21,
})  # fmt: skip
"""Convolutions of few channels a group, of the FP32 peak outside tensor cores; above 1 these are used all the same."""

FAST_GROUPS = 32
"""Half convolutions in channels_last are fast for multiples of this (ResNeXt) and slow for others (RegNet: 2 to 63)."""

_CONVOLUTION_BANDWIDTH, _CHANNELS_LAST_BANDWIDTH = 0.48, 0.95


def tensor_cores(gpu: Gpu) -> TensorCores:
    """Return the class of a GPU, by the peak of its tensor cores over that of its ordinary FP32 cores.

    About 2 on GeForce cards from Ampere on ("halved"), 4 on workstation cards, 8 and more on V100, A100, H100, Turing.
    """
    ratio = gpu.fp16_tflops / gpu.fp32_tflops
    return "halved" if ratio < 3 else "workstation" if ratio < 6 else "data center"


def arithmetic_share(operation: Operation, precision: str, gpu: Gpu) -> float:
    """Return the share of the precision's peak that a product or a dense convolution reaches."""
    known = "fp16" if precision == "bf16" else precision
    if operation.kind == "convolution":
        return _CONVOLUTIONS[tensor_cores(gpu), known]
    return _PRODUCTS[known]


def narrow_share(operation: Operation, *, half: bool) -> float:
    """Return the share of the FP32 peak that a grouped or depthwise convolution reaches."""
    kind = operation.kind.split()[0]
    if not half:
        return _NARROW[kind, "fp32"]
    if not operation.channels_last:
        return _NARROW[kind, "half, contiguous"]
    other = kind == "grouped" and operation.groups % FAST_GROUPS
    return _NARROW[kind, "half, channels_last, other groups" if other else "half, channels_last"]


def moving_share(operation: Operation, *, half: bool) -> float | None:
    """Return the share of the bandwidth that a convolution reaches; None for all other operators, which reach more."""
    if "convolution" not in operation.kind:
        return None
    return _CHANNELS_LAST_BANDWIDTH if half and operation.channels_last else _CONVOLUTION_BANDWIDTH
