"""What an installed policy costs per forward against autocast by hand: fifty tiny layers, where it would show."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from autoprec import Policy, apply_policy, remove_policy
from gpu_parts import Context

__all__ = ["compare_overhead"]

NUM_LAYERS, WIDTH = 50, 16


def tiny_linears(device: torch.device) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS))).to(device)


def compare_overhead(context: Context) -> dict[str, Any]:
    """Print the medians of both, interleaved, and the median of their ratios; the time includes the launches only."""
    model = tiny_linears(context.device)
    x = torch.randn(8, WIDTH, device=context.device)
    dtype = torch.float16 if context.is_cuda else torch.bfloat16

    def by_hand() -> None:
        with torch.autocast(context.device.type, dtype=dtype):
            model(x).float()

    policy = Policy(default="autocast", dtype="fp16" if context.is_cuda else "bf16")
    pairs = []
    for index in range(10 if context.quick else 60):
        times = {}
        for installed in (index % 2 == 0, index % 2 == 1):
            if installed:
                apply_policy(model, policy)
                times[True] = _seconds(lambda: model(x), context)
                remove_policy(model)
            else:
                times[False] = _seconds(by_hand, context)
        pairs.append((times[False], times[True]))
    hand, installed_time = (statistics.median(times) for times in zip(*pairs, strict=True))
    ratio = statistics.median(b / a for a, b in pairs)
    print(f"\n{NUM_LAYERS} nn.Linear({WIDTH}), forward ({context.kind})")
    print(f"autocast by hand {hand * 1e6:.0f} us, policy {installed_time * 1e6:.0f} us, ratio {ratio:.3f}")
    return {"by_hand_seconds": hand, "policy_seconds": installed_time, "ratio": ratio, "kind": context.kind}


def _seconds(call: Callable[[], object], context: Context, repeats: int = 20) -> float:
    """Return the median time of a call after three that warm up, without garbage collections in between."""
    for _ in range(3):
        call()
    context.synchronize()
    gc.collect()
    gc.disable()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        context.synchronize()
        times.append(time.perf_counter() - start)
    gc.enable()
    return statistics.median(times)
