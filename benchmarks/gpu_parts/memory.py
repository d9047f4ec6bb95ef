"""The memory model: computed peaks beside `max_memory_allocated`, or beside a tracked step on a CPU."""

from __future__ import annotations

from typing import Any

import torch

from autoprec import Policy
from autoprec.estimates import StepSettings, estimate_step, real_peak
from gpu_parts import Context
from gpu_parts.networks import NETWORKS
from gpu_parts.steps import Arm, peak_memory

__all__ = ["compare_memory"]

UNIFORM = {
    "fp32": Policy(default="fp32"),
    "autocast": Policy(default="autocast", dtype="fp16"),
    "fp16": Policy(default="fp16"),
}


def compare_memory(context: Context) -> list[dict[str, Any]]:
    results = []
    beside = "max_memory_allocated" if context.is_cuda else "tracked on a CPU"
    print(f"\n{'model':<12}{'policy':<10}{'computed MiB':>14}{beside + ' MiB':>26}{'difference':>12}")
    for name in context.models:
        for label, policy in UNIFORM.items():
            computed, found = _computed(name, policy, context), _found(name, policy, context)
            results.append({"model": name, "policy": label, "computed_bytes": computed, "measured_bytes": found})
            difference = computed / found - 1
            print(f"{name:<12}{label:<10}{computed / 2**20:14.1f}{found / 2**20:26.1f}{difference:+11.1%}", flush=True)
            context.results["memory"] = results
    return results


def _computed(name: str, policy: Policy, context: Context) -> float:
    network = NETWORKS[name]
    torch.manual_seed(0)
    model = network.build(context.quick).to(memory_format=torch.channels_last)
    rounding = {} if context.is_cuda else {"rounding_bytes": 1}
    estimate = estimate_step(model, network.batch(context.quick), network.loss, policy=policy, **rounding)
    return estimate.peak_memory_bytes.value


def _found(name: str, policy: Policy, context: Context) -> float:
    if context.is_cuda:
        return float(peak_memory(Arm("policy", policy=policy), name, context, compiled=False) or 0)
    network = NETWORKS[name]
    torch.manual_seed(0)
    model = network.build(context.quick).to(memory_format=torch.channels_last)
    batch = network.batch(context.quick)
    return float(real_peak(model, batch, network.loss, settings=StepSettings(policy=policy)).peak_bytes)
