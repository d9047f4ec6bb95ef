"""How far a predicted ratio of throughputs may be from the real one, by class of GPU."""

from __future__ import annotations

from collections.abc import Collection
from types import MappingProxyType

from autoprec.estimates.efficiencies import TensorCores, tensor_cores
from autoprec.estimates.gpus import Gpu, gpu_by_name

__all__ = ["RATIO_ERROR", "throughput_ratio_interval"]

RATIO_ERROR = 0.4
"""Relative error of a predicted ratio that no published one exceeds, whatever the GPU; `throughput_ratio_interval` is
narrower and knows the GPU."""

_PUBLISHED_OVER_PREDICTED: MappingProxyType[TensorCores, tuple[float, float]] = MappingProxyType({
    "halved": (0.88, 1.14),
    "workstation": (0.64, 1.22),
    "data center": (0.64, 1.22),
})  # fmt: skip
"""Smallest and largest published ratio over the predicted one, of 48 runs in both halves (benchmarks/estimates.py
published). Three runs are of workstation cards: they get the widest interval."""


def throughput_ratio_interval(
    ratio: float, *, gpu: Gpu | str, kinds: Collection[str] | None = None
) -> tuple[float, float]:
    """Return between what a predicted ratio of throughputs really lies on `gpu`, as published runs tell.

    The interval is not symmetric: predictions are more often too high than too low.

    Args:
        ratio: throughput of an arm over another's, both predicted, above 0.
        kinds: kinds of the model's operators; not yet told apart, there are too few published runs of each.

    Raises:
        UsageError: no such GPU.
    """
    low, high = _PUBLISHED_OVER_PREDICTED[tensor_cores(gpu_by_name(gpu) if isinstance(gpu, str) else gpu)]
    return ratio * low, ratio * high
