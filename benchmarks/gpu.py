"""Step time and peak memory of FP32, TF32, stock autocast and an autoprec policy, interleaved in one run.

    python benchmarks/gpu.py                         # on a CUDA machine
    python benchmarks/gpu.py --device cpu --quick    # proves the script; its figures say nothing about a GPU

Needs no network: torch, torchvision and autoprec's few wheels. Prints a table as it goes and writes the JSON after each
model (`--output`), so that an interrupted run still counts. Every arm of a model starts from the same weights, uses the
same batch and channels_last; step times are medians of interleaved rounds, and each figure is labelled with its kind.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import torchvision

import autoprec
from autoprec.policy import Policy, write_atomically

POLICIES = {
    "resnet50": Policy(default="fp16", modules={"fc": "fp32"}),
    "vit_b_16": Policy(default="autocast", modules={"encoder": "fp16"}),
}
"""What autoprec's arm uses where no policy file is given (`--policy MODEL=FILE`)."""

SHAPES = {"resnet50": (128, 224), "vit_b_16": (64, 224)}
QUICK_SHAPES = {"resnet50": (2, 64), "vit_b_16": (2, 64)}


@dataclass
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
    arms = [
        Arm("fp32", tf32=False),
        Arm("tf32"),
        Arm("autocast_fp16", autocast=torch.float16),
        Arm("autocast_bf16", autocast=torch.bfloat16),
        Arm("autoprec", policy=policy),
    ]
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        arms = [arm for arm in arms if arm.name not in ("tf32", "autocast_bf16")]
    return arms if device.type == "cuda" else [arm for arm in arms if arm.name != "tf32"]


@contextlib.contextmanager
def float32_products(tf32: bool) -> Iterator[None]:
    """Set how FP32 products are computed, by the one switch that torch 2.9 and later document."""
    before = (torch.backends.cuda.matmul.fp32_precision, torch.backends.cudnn.conv.fp32_precision)
    try:
        torch.backends.cuda.matmul.fp32_precision = "tf32" if tf32 else "ieee"
        torch.backends.cudnn.conv.fp32_precision = "tf32" if tf32 else "ieee"
        yield
    finally:
        torch.backends.cuda.matmul.fp32_precision, torch.backends.cudnn.conv.fp32_precision = before


class Training:
    """A model, its optimizer and scaler in one arm; `step()` is a whole training step on a fixed batch."""

    def __init__(self, arm: Arm, model_name: str, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
        torch.manual_seed(0)
        self.arm = arm
        self.images, self.labels = batch
        device = self.images.device
        settings = {"image_size": self.images.shape[-1]} if model_name.startswith("vit") else {}
        model = torchvision.models.get_model(model_name, num_classes=1000, **settings)
        self.model = model.to(device, memory_format=torch.channels_last).train()
        if arm.policy is not None:
            autoprec.apply_policy(self.model, arm.policy)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.scaler = torch.amp.GradScaler(device.type, enabled=arm.needs_scaler)

    def step(self) -> float:
        with float32_products(self.arm.tf32):
            self.optimizer.zero_grad()
            context: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
            if self.arm.autocast is not None:
                context = torch.autocast(self.images.device.type, dtype=self.arm.autocast)
            with context:
                loss = F.cross_entropy(self.model(self.images), self.labels)
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
        return float(loss.detach()) if self.images.device.type == "cpu" else 0.0


def seconds(step: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Return the time of one step: CUDA events around `repeats` steps, or the clock on a CPU."""
    if device.type != "cuda":
        start = time.perf_counter()
        for _ in range(repeats):
            step()
        return (time.perf_counter() - start) / repeats
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(repeats):
        step()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1000 / repeats


def peak_memory(arm: Arm, model_name: str, batch: tuple[torch.Tensor, torch.Tensor]) -> int | None:
    """Return the peak of `max_memory_allocated` over steps after a warm-up, with no other arm alive; None on a CPU."""
    device = batch[0].device
    if device.type != "cuda":
        return None
    gc.collect()
    torch.cuda.empty_cache()
    training = Training(arm, model_name, batch)
    for _ in range(3):
        training.step()
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    for _ in range(3):
        training.step()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device)


def measure(model_name: str, arms: list[Arm], device: torch.device, *, quick: bool, rounds: int) -> dict[str, Any]:
    batch_size, image_size = (QUICK_SHAPES if quick else SHAPES)[model_name]
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(batch_size, 3, image_size, image_size, generator=generator)
    batch = (
        images.to(device, memory_format=torch.channels_last),
        torch.randint(1000, (batch_size,), generator=generator).to(device),
    )
    memory = {arm.name: peak_memory(arm, model_name, batch) for arm in arms}
    trainings = [Training(arm, model_name, batch) for arm in arms]
    repeats, warmup = (1, 1) if quick else (5, 5)
    for training in trainings:
        for _ in range(warmup):
            training.step()
    times: dict[str, list[float]] = {arm.name: [] for arm in arms}
    for round_index in range(rounds):
        order = trainings[round_index % len(trainings) :] + trainings[: round_index % len(trainings)]
        for training in order:
            times[training.arm.name].append(seconds(training.step, device, repeats))
    return {
        "model": model_name,
        "batch_size": batch_size,
        "image_size": image_size,
        "memory_format": "channels_last",
        "optimizer": "AdamW",
        "arms": {
            name: {
                "step_seconds": {"median": statistics.median(values), "kind": "measured", "rounds": len(values)},
                "images_per_second": {"value": batch_size / statistics.median(values), "kind": "measured"},
                "peak_memory_bytes": {"value": memory[name], "kind": "measured"} if memory[name] else None,
            }
            for name, values in times.items()
        },
    }


def print_table(result: dict[str, Any], emulated: bool) -> None:
    arms = result["arms"]
    base = arms["fp32"]
    print(f"\n{result['model']}  batch {result['batch_size']}  {result['image_size']} px  channels_last  AdamW")
    print(f"{'arm':<16}{'step ms':>10}{'speed-up':>10}{'peak GiB':>10}{'of fp32':>9}   kind")
    for name, arm in arms.items():
        step = arm["step_seconds"]["median"]
        memory, base_memory = arm["peak_memory_bytes"], base["peak_memory_bytes"]
        shown = f"{'-':>10}{'-':>9}"
        if memory:
            shown = f"{memory['value'] / 2**30:10.2f}{memory['value'] / base_memory['value']:8.2f}x"
        speed = base["step_seconds"]["median"] / step
        kind = "measured" if not emulated else "measured on a CPU, FP16 emulated: no figure of a GPU"
        print(f"{name:<16}{step * 1000:10.1f}{speed:9.2f}x{shown}   {kind}")


def environment(device: torch.device) -> dict[str, Any]:
    details: dict[str, Any] = {
        "torch": torch.__version__,
        "torchvision": torchvision.__version__,
        "autoprec": autoprec.__version__,
        "python": platform.python_version(),
        "device": device.type,
        "date": time.strftime("%Y-%m-%d"),
    }
    if device.type == "cuda":
        details["gpu"] = torch.cuda.get_device_name(device)
        details["capability"] = ".".join(map(str, torch.cuda.get_device_capability(device)))
        details["cuda"] = torch.version.cuda
        reduced = torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction
        details["allow_fp16_reduced_precision_reduction"] = reduced
    return details


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cuda", "cpu"])
    parser.add_argument("--quick", action="store_true", help="tiny shapes and few rounds")
    parser.add_argument("--rounds", type=int, help="interleaved rounds (default 15, 2 with --quick)")
    parser.add_argument("--models", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--policy", action="append", default=[], metavar="MODEL=FILE", help="policy.json of a search")
    parser.add_argument("--output", type=Path, default=Path("gpu.json"))
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device is there; --device cpu --quick proves the script")
    policies = POLICIES | {
        name: autoprec.load_policy(path) for name, _, path in (text.partition("=") for text in args.policy)
    }
    device = torch.device(args.device)
    rounds = args.rounds or (2 if args.quick else 15)
    report: dict[str, Any] = {"environment": environment(device), "results": []}
    print(json.dumps(report["environment"]))
    with autoprec.emulate() if device.type == "cpu" else contextlib.nullcontext():
        for model_name in args.models:
            arms = arms_of(policies[model_name], device)
            result = measure(model_name, arms, device, quick=args.quick, rounds=rounds)
            report["results"].append(result)
            print_table(result, emulated=device.type == "cpu")
            write_atomically(args.output, json.dumps(report, indent=2, allow_nan=False) + os.linesep)
    print(f"\nwritten to {args.output.name}")


if __name__ == "__main__":
    main()
