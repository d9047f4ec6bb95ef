"""What an installed policy costs per forward against autocast by hand: fifty tiny layers, where it would show."""

from __future__ import annotations

import statistics
from typing import Any

import torch
from apply import NUM_LAYERS, WIDTH, seconds, tiny_linears

from autoprec import Policy, apply_policy, remove_policy
from gpu_parts import Context

__all__ = ["compare_overhead"]

REPEATS = 20


def compare_overhead(context: Context) -> dict[str, Any]:
    """Print the medians of both, interleaved, and the median of their ratios; on a CPU with one thread."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _compare(context)
    finally:
        torch.set_num_threads(num_threads)


def _compare(context: Context) -> dict[str, Any]:
    model = tiny_linears().to(context.device)
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
                times[True] = seconds(lambda: model(x), REPEATS, synchronize=context.synchronize)
                remove_policy(model)
            else:
                times[False] = seconds(by_hand, REPEATS, synchronize=context.synchronize)
        pairs.append((times[False], times[True]))
    hand, installed_time = (statistics.median(times) for times in zip(*pairs, strict=True))
    ratio = statistics.median(b / a for a, b in pairs)
    print(f"\n{NUM_LAYERS} nn.Linear({WIDTH}), forward ({context.kind})")
    print(f"autocast by hand {hand * 1e6:.0f} us, policy {installed_time * 1e6:.0f} us, ratio {ratio:.3f}")
    return {"by_hand_seconds": hand, "policy_seconds": installed_time, "ratio": ratio, "kind": context.kind}
