"""Print what the estimates claim: exactness of the computed peak, known figures, predicted beside published ratios.

python benchmarks/estimates.py [exactness] [memory] [published] [toy]
"""

from __future__ import annotations

import statistics
import sys
import time
import warnings
from typing import Any

import torch
import torchvision
from published import comparisons, image_loss
from torch import nn

from autoprec.estimates import Roofline, StepSettings, estimate_step, gpu_by_name, peak_memory, real_peak, record_step
from autoprec.estimates.efficiencies import tensor_cores
from autoprec.policy import Policy

FP32 = Policy(default="fp32")
AUTOCAST = Policy(default="autocast", dtype="fp16")
FP16 = Policy(default="fp16")
POLICIES = {"fp32": FP32, "autocast": AUTOCAST, "fp16": FP16}
GIB = 2**30

EXACTNESS_MODELS: dict[str, dict[str, Any]] = {
    "resnet18": {},
    "densenet121": {},
    "googlenet": {"init_weights": False},
    "mobilenet_v3_small": {},
    "efficientnet_b0": {},
    "squeezenet1_1": {},
    "shufflenet_v2_x0_5": {},
    "regnet_x_400mf": {},
    "convnext_tiny": {},
    "vit_b_16": {"image_size": 64},
    "swin_t": {},
}


def images(batch_size: int, image_size: int, *, channels_last: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    pixels = torch.zeros(batch_size, 3, image_size, image_size)
    if channels_last:
        pixels = pixels.contiguous(memory_format=torch.channels_last)
    return pixels, torch.zeros(batch_size, dtype=torch.long)


def print_exactness() -> None:
    print("Computed against tracked peak of a real step (raw bytes, SGD, batch 16, 64 px), MiB and difference")
    for name, arguments in EXACTNESS_MODELS.items():
        model = torchvision.models.get_model(name, num_classes=10, **arguments)
        cells = []
        for label, policy in POLICIES.items():
            settings = StepSettings(policy=policy, optimizer=torch.optim.SGD, as_on_cuda=False)
            batch = images(16, 64)
            computed = peak_memory(
                record_step(model, batch, image_loss, settings=settings), rounding_bytes=1
            ).peak_bytes
            real = real_peak(model, batch, image_loss, settings=settings).peak_bytes
            cells.append(f"{label} {computed / 2**20:8.2f} {real / 2**20:8.2f} {computed / real - 1:+.3%}")
        print(f"  {name:20s} " + "   ".join(cells), flush=True)


def print_memory() -> None:
    print("Peak memory computed, GiB (rounded to 512 bytes a storage), and seconds to compute it")
    momentum = {"lr": 0.1, "momentum": 0.9}
    resnet = torchvision.models.resnet50()
    for label, policy in POLICIES.items():
        _print_peak(f"resnet50 batch 128, 224 px, SGD with momentum, {label}", resnet, 128, policy, momentum)
    vit = torchvision.models.vit_b_16()
    norms = {name: "fp16" for name, module in vit.named_modules() if isinstance(module, nn.LayerNorm)}
    stream = AUTOCAST.replace(modules={**norms, "encoder.dropout": "fp16"})
    arms = {"fp32": FP32, "autocast": AUTOCAST, "LayerNorms in half": AUTOCAST.replace(modules=norms)}
    arms |= {"LayerNorms and residual stream in half": stream}
    for label, policy in arms.items():
        _print_peak(f"vit_b_16 batch 64, 224 px, SGD, {label}", vit, 64, policy, {"lr": 0.1})


def _print_peak(label: str, model: nn.Module, batch_size: int, policy: Policy, settings: dict[str, float]) -> None:
    start, cpu_start = time.perf_counter(), time.process_time()
    estimate = estimate_step(
        model,
        images(2, 224),
        image_loss,
        policy=policy,
        batch_size=batch_size,
        optimizer=torch.optim.SGD,
        optimizer_settings=settings,
    )
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    peak = estimate.peak_memory_bytes.value / GIB
    print(f"  {label:75s} {peak:6.2f} GiB  {seconds:5.2f} s ({cpu_seconds:.2f} s of processor time)", flush=True)


def print_published() -> None:
    print("Predicted beside published throughput: error of the ratio and of either figure, and rank correlations")
    found = list(comparisons())
    for half in ("tuning", "testing"):
        runs = [run for run in found if run.half == half]
        ratios = [run.predicted_ratio for run in runs], [run.published_ratio for run in runs]
        figures = [n for run in runs for n in run.predicted], [n for run in runs for n in run.published]
        models = {run.models[0].model for run in runs}
        print(f"  {half}: {len(runs)} runs of {len(models)} models")
        for label, (predicted, published) in {"ratio": ratios, "figures": figures}.items():
            errors = [abs(ours / theirs - 1) for ours, theirs in zip(predicted, published, strict=True)]
            ranked = statistics.correlation(_ranks(predicted), _ranks(published))
            tenth = statistics.quantiles(errors, n=10)[-1]
            print(
                f"    {label}: median error {statistics.median(errors):.3f}, 90 % {tenth:.3f}, rank correlation"
                f" {ranked:.2f}",
                flush=True,
            )
        for cores in ("halved", "workstation", "data center"):
            over = [run.published_ratio / run.predicted_ratio for run in runs if _cores(run.gpu) == cores]
            if over:
                print(
                    f"    published over predicted ratio, {cores}: {min(over):.2f} to {max(over):.2f}, {len(over)} runs"
                )


def _ranks(values: list[float]) -> list[float]:
    """Return each value's rank; equal values share the mean of theirs."""
    ordered = sorted(values)
    return [ordered.index(value) + (ordered.count(value) - 1) / 2 for value in values]


def _cores(gpu: str) -> str:
    return tensor_cores(gpu_by_name(gpu))


def print_toy() -> None:
    print("resnet50 on an A100-80, autocast FP16 over FP32 (TF32), the shape decides")
    model = torchvision.models.resnet50()
    for batch_size, image_size in ((32, 32), (128, 224)):
        batch = images(batch_size, image_size)
        base, amp = (
            estimate_step(model, batch, image_loss, policy=policy, roofline=Roofline()) for policy in (FP32, AUTOCAST)
        )
        speed = amp.throughput_samples_per_second.value / base.throughput_samples_per_second.value
        memory = amp.peak_memory_bytes.value / base.peak_memory_bytes.value
        print(
            f"  batch {batch_size}, {image_size} px: speed {speed:.2f}x, memory {memory:.2f}x,"
            f" the host busy for {base.launch_share:.0%} of the FP32 step",
            flush=True,
        )


SECTIONS = {
    "memory": print_memory,
    "published": print_published,
    "toy": print_toy,
    "exactness": print_exactness,
}

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    for section in sys.argv[1:] or SECTIONS:
        SECTIONS[section]()
