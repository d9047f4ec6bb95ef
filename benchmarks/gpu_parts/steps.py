"""Step time and peak memory of FP32, TF32, stock autocast and a policy, interleaved, eager or compiled."""

from __future__ import annotations

import contextlib
import gc
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from autoprec import Policy, apply_policy
from gpu_parts import Context
from gpu_parts.networks import NETWORKS

__all__ = ["Arm", "Training", "arms_of", "measure_compiled", "measure_eager"]

NUM_MEMORY_STEPS = 3


@dataclass(frozen=True)
class Arm:
    """One way to train: `policy` is installed by autoprec, `autocast` is torch's own context."""

    name: str
    tf32: bool = True
    policy: Policy | None = None
    autocast: torch.dtype | None = None

    @property
    def needs_scaler(self) -> bool:
        return self.autocast is torch.float16 or (self.policy is not None and self.policy.needs_grad_scaler)


def arms_of(policy: Policy, device: torch.device) -> list[Arm]:
    """Return the arms that the device can compute in: TF32 and BF16 need CUDA capability 8.0."""
    arms = [
        Arm("fp32", tf32=False),
        Arm("tf32"),
        Arm("autocast_fp16", autocast=torch.float16),
        Arm("autocast_bf16", autocast=torch.bfloat16),
        Arm("autoprec", policy=policy),
    ]
    if device.type != "cuda":
        return [arm for arm in arms if arm.name != "tf32"]
    if torch.cuda.get_device_capability(device) < (8, 0):
        return [arm for arm in arms if arm.name not in ("tf32", "autocast_bf16")]
    return arms


@contextlib.contextmanager
def float32_products(tf32: bool) -> Iterator[None]:
    """Set how FP32 products are computed, by the one switch that torch 2.9 and later document."""
    switches = (torch.backends.cuda.matmul, torch.backends.cudnn.conv)
    before = [switch.fp32_precision for switch in switches]
    try:
        for switch in switches:
            switch.fp32_precision = "tf32" if tf32 else "ieee"
        yield
    finally:
        for switch, value in zip(switches, before, strict=True):
            switch.fp32_precision = value


class Training:
    """A model, its optimizer and scaler in one arm; `step()` is a whole training step on a fixed batch."""

    def __init__(self, arm: Arm, name: str, context: Context, *, compiled: bool = False) -> None:
        torch.manual_seed(0)
        network = NETWORKS[name]
        self.arm, self.device, self.compute_loss = arm, context.device, network.loss
        self.batch = tuple(tensor.to(context.device) for tensor in network.batch(context.quick))
        model = network.build(context.quick).to(context.device, memory_format=torch.channels_last).train()
        if arm.policy is not None:
            apply_policy(model, arm.policy)
        self.model = torch.compile(model, backend="inductor" if context.is_cuda else "eager") if compiled else model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        self.scaler = torch.amp.GradScaler(context.device.type, enabled=arm.needs_scaler)

    def step(self) -> torch.Tensor:
        """Train on the batch and return the loss, still on the device."""
        with float32_products(self.arm.tf32):
            self.optimizer.zero_grad()
            autocast: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
            if self.arm.autocast is not None:
                autocast = torch.autocast(self.device.type, dtype=self.arm.autocast)
            with autocast:
                loss = self.compute_loss(self.model, self.batch)
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
        return loss.detach()


def seconds(training: Training, repeats: int) -> float:
    """Return the time of one step: CUDA events around `repeats` steps, or the clock on a CPU."""
    if training.device.type != "cuda":
        start = time.perf_counter()
        for _ in range(repeats):
            training.step()
        return (time.perf_counter() - start) / repeats
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(repeats):
        training.step()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1000 / repeats


def peak_memory(arm: Arm, name: str, context: Context, *, compiled: bool) -> int | None:
    """Return `max_memory_allocated` over steps after a warm-up, with no other arm alive; None on a CPU."""
    if not context.is_cuda:
        return None
    gc.collect()
    torch.cuda.empty_cache()
    training = Training(arm, name, context, compiled=compiled)
    for _ in range(NUM_MEMORY_STEPS):
        training.step()
    context.synchronize()
    torch.cuda.reset_peak_memory_stats(context.device)
    for _ in range(NUM_MEMORY_STEPS):
        training.step()
    context.synchronize()
    return torch.cuda.max_memory_allocated(context.device)


def measure_eager(context: Context) -> list[dict[str, Any]]:
    return _measure(context, compiled=False)


def measure_compiled(context: Context) -> list[dict[str, Any]]:
    return _measure(context, compiled=True)


def _measure(context: Context, *, compiled: bool) -> list[dict[str, Any]]:
    results = []
    for name in context.models:
        if context.seconds_left < 20:
            print(f"{name}: no time left")
            break
        results.append(measure(name, context, compiled=compiled))
        print_table(results[-1], context.kind)
        context.results["compiled" if compiled else "eager"] = results
    return results


def measure(name: str, context: Context, *, compiled: bool) -> dict[str, Any]:
    """Measure the arms of one network, in rounds whose order rotates."""
    arms = arms_of(context.policies[name], context.device)
    repeats, warmup = (1, 1) if context.quick else (5, 5)
    with context.arithmetic():
        memory = {arm.name: peak_memory(arm, name, context, compiled=compiled) for arm in arms}
        trainings = [Training(arm, name, context, compiled=compiled) for arm in arms]
        for training in trainings:
            for _ in range(warmup):
                training.step()
        times: dict[str, list[float]] = {arm.name: [] for arm in arms}
        for index in range(context.rounds):
            start = index % len(trainings)
            for training in trainings[start:] + trainings[:start]:
                times[training.arm.name].append(seconds(training, repeats))
    num_samples = len(trainings[0].batch[0])
    return {
        "model": name,
        "shape": NETWORKS[name].shape(context.quick),
        "mode": "compiled" if compiled else "eager",
        "memory_format": "channels_last",
        "optimizer": "AdamW",
        "kind": context.kind,
        "arms": {
            arm: {
                "step_seconds": statistics.median(values),
                "ratio_to_fp32": statistics.median(a / b for a, b in zip(times["fp32"], values, strict=True)),
                "num_rounds": len(values),
                "samples_per_second": num_samples / statistics.median(values),
                "peak_memory_bytes": memory[arm],
            }
            for arm, values in times.items()
        },
    }


def print_table(result: dict[str, Any], kind: str) -> None:
    arms = result["arms"]
    base = arms["fp32"]["peak_memory_bytes"]
    print(f"\n{result['model']}  {result['shape']}  {result['mode']}  channels_last  AdamW  ({kind})")
    print(f"{'arm':<16}{'step ms':>10}{'speed-up':>10}{'samples/s':>11}{'peak GiB':>10}{'of fp32':>9}")
    for name, arm in arms.items():
        memory = arm["peak_memory_bytes"]
        shown = f"{memory / 2**30:10.2f}{memory / base:8.2f}x" if memory else f"{'-':>10}{'-':>9}"
        speed = f"{arm['step_seconds'] * 1000:10.1f}{arm['ratio_to_fp32']:9.2f}x{arm['samples_per_second']:11.0f}"
        print(f"{name:<16}{speed}{shown}", flush=True)
