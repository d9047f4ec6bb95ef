"""Print what a policy costs on the CPU: against one torch.autocast, contexts, casts, and the time to apply.

    python benchmarks/apply.py

Figures are medians of interleaved rounds in one process; ratios are medians of the ratios of each round.
"""

from __future__ import annotations

import copy
import gc
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

from autoprec import Policy, apply_policy, remove_policy
from autoprec.apply.state import num_regions_entered, num_weight_casts

NUM_LAYERS, WIDTH = 50, 16
NUM_MODULES = 1000


def tiny_linears() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS)))


class Stack(nn.Module):
    """The same layers in a list, called in a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(tiny_linears())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def seconds(call: Callable[[], object], repeats: int, *, synchronize: Callable[[], object] = lambda: None) -> float:
    """Return the median time of one call after three that warm up, without garbage collections in between."""
    for _ in range(3):
        call()
    synchronize()
    gc.collect()
    gc.disable()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        synchronize()
        times.append(time.perf_counter() - start)
    gc.enable()
    return statistics.median(times)


def compare(model: nn.Module, bare: Callable[[], object], policy: Policy, x: torch.Tensor, *, rounds: int = 60) -> str:
    """Return the medians in microseconds of `bare` and of the same model under `policy`, and of their ratio."""
    pairs = []
    for index in range(rounds):
        times = {}
        for with_policy in (index % 2 == 0, index % 2 == 1):
            if with_policy:
                apply_policy(model, policy)
                times[True] = seconds(lambda: model(x), 20)
                remove_policy(model)
            else:
                times[False] = seconds(bare, 20)
        pairs.append((times[False], times[True]))
    ratio = statistics.median(b / a for a, b in pairs)
    without, under = (statistics.median(times) * 1e6 for times in zip(*pairs, strict=True))
    return f"{without:9.1f} us {under:9.1f} us   ratio {ratio:.3f}"


def overhead(model: nn.Module, name: str) -> None:
    x = torch.randn(8, 16)

    def stock() -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(x).float()

    stock_autocast = Policy(default="autocast", dtype="bf16")
    print(f"{name:34s} one autocast, policy   {compare(model, stock, stock_autocast, x)}")
    print(f"{name:34s} bare, fp32 policy      {compare(model, lambda: model(x), Policy(default='fp32'), x)}")
    half = copy.deepcopy(model).bfloat16()
    print(f"{name:34s} bare bf16, bf16 policy {compare(model, lambda: half(x.bfloat16()), Policy(default='bf16'), x)}")
    apply_policy(model, Policy(default="bf16"))
    model(x)
    print(f"{'':34s} regions entered {num_regions_entered()}, weights cast {num_weight_casts()} of {2 * NUM_LAYERS}")
    remove_policy(model)


def alternating() -> None:
    model = tiny_linears()
    modules = {str(index): "fp32" for index in range(1, NUM_LAYERS, 2)}
    apply_policy(model, Policy(default="autocast", dtype="bf16", modules=modules))
    x = torch.randn(8, 16)
    model(x)
    print(f"alternating autocast and fp32: {num_regions_entered()} contexts entered for {1 + NUM_LAYERS // 2} regions")


def apply_time() -> None:
    model = nn.Sequential(*(nn.Sequential(*(nn.Linear(4, 4) for _ in range(9))) for _ in range(NUM_MODULES // 10)))
    for policy in (Policy(), Policy(default="fp16"), Policy(modules={"*.3": "fp32", "1.*": "bf16"})):
        times = []
        for _ in range(9):
            start = time.perf_counter()
            apply_policy(model, policy)
            times.append(time.perf_counter() - start)
            remove_policy(model)
        label = f"{policy.default} with {len(policy.modules)} rules"
        print(f"apply {label:22s} to {NUM_MODULES} modules: {statistics.median(times) * 1e3:.1f} ms")


def main() -> None:
    torch.set_num_threads(1)
    overhead(tiny_linears(), "nn.Sequential of 50 nn.Linear(16)")
    overhead(Stack(), "a loop over nn.ModuleList")
    alternating()
    apply_time()


if __name__ == "__main__":
    main()
