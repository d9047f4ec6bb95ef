"""Print what the estimates claim: exactness of the computed peak, known figures, predicted beside published ratios.

python benchmarks/estimates.py [exactness] [memory] [throughput] [formats] [toy]
"""

from __future__ import annotations

import math
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torchvision
from torch import nn
from torch.nn import functional as F

from autoprec.estimates import Roofline, StepSettings, estimate_step, peak_memory, real_peak, record_step
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


def image_loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    output = model(batch[0])
    heads = output if isinstance(output, tuple) else (output,)
    return torch.stack([F.cross_entropy(head, batch[1]) for head in heads]).sum()


def images(batch_size: int, image_size: int, *, channels_last: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    pixels = torch.zeros(batch_size, 3, image_size, image_size)
    if channels_last:
        pixels = pixels.contiguous(memory_format=torch.channels_last)
    return pixels, torch.zeros(batch_size, dtype=torch.long)


class BertLayer(nn.Module):
    """A post-norm encoder layer, its attention written out operator by operator or fused."""

    def __init__(self, width: int, num_heads: int, *, fused_attention: bool) -> None:
        super().__init__()
        self.num_heads, self.fused_attention = num_heads, fused_attention
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.output, self.attention_norm = nn.Linear(width, width), nn.LayerNorm(width)
        self.up, self.down, self.norm = nn.Linear(width, 4 * width), nn.Linear(4 * width, width), nn.LayerNorm(width)
        self.probability_dropout, self.attention_dropout, self.dropout = (nn.Dropout(0.1) for _ in range(3))
        self.softmax, self.gelu = nn.Softmax(dim=-1), nn.GELU()

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            part(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        if self.fused_attention:
            context = F.scaled_dot_product_attention(query, key, value, mask, dropout_p=0.1)
        else:
            scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1]) + mask
            context = self.probability_dropout(self.softmax(scores)) @ value
        context = context.transpose(1, 2).flatten(2)
        x = self.attention_norm(x + self.attention_dropout(self.output(context)))
        return self.norm(x + self.dropout(self.down(self.gelu(self.up(x)))))


class BertLarge(nn.Module):
    """BERT-large for pretraining: 24 layers, width 1024, 16 heads; the word head sees the masked places alone."""

    def __init__(self, *, fused_attention: bool, vocabulary: int = 30528, width: int = 1024) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(vocabulary, width), nn.Embedding(512, width)
        self.norm, self.dropout = nn.LayerNorm(width), nn.Dropout(0.1)
        self.layers = nn.ModuleList(BertLayer(width, 16, fused_attention=fused_attention) for _ in range(24))
        self.transform, self.transform_norm = nn.Linear(width, width), nn.LayerNorm(width)
        self.gelu, self.head = nn.GELU(), nn.Linear(width, vocabulary)
        self.head.weight = self.words.weight

    def forward(self, ids: torch.Tensor, mask: torch.Tensor, num_masked: int) -> torch.Tensor:
        x = self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        x = self.dropout(self.norm(x))
        for layer in self.layers:
            x = layer(x, mask)
        masked = self.transform_norm(self.gelu(self.transform(x[:, :num_masked])))
        logits: torch.Tensor = self.head(masked)
        return logits


def bert_loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> torch.Tensor:
    ids, mask, words = batch
    return F.cross_entropy(model(ids, mask, words.shape[1]).flatten(0, 1), words.flatten())


def bert_batch(batch_size: int, length: int, num_masked: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    ids = torch.zeros(batch_size, length, dtype=torch.long)
    return ids, torch.zeros(batch_size, 1, 1, length), torch.zeros(batch_size, num_masked, dtype=torch.long)


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


def throughput(
    model: nn.Module, batch: Any, loss: Callable[..., torch.Tensor], policy: Policy, gpu: str, **settings: Any
) -> float:
    estimate = estimate_step(
        model,
        batch,
        loss,
        policy=policy,
        gpu=gpu,
        optimizer=torch.optim.SGD,
        optimizer_settings={"lr": 0.1, "momentum": 0.9},
        **settings,
    )
    return estimate.throughput_samples_per_second.value


PUBLISHED_IMAGES = {
    ("resnet50", "a100-80", 256): (938, 2470),
    ("resnet50", "v100-16", 128): (367, 1200),
    ("resnext101_32x4d", "a100-80", 128): (3471 / 8, 7925 / 8),
    ("resnext101_32x4d", "v100-16", 64): (1133 / 8, 4065 / 8),
    ("efficientnet_b0", "a100-80", 256): (8193 / 8, 16652 / 8),
    ("efficientnet_b0", "v100-16", 128): (4672 / 8, 7789 / 8),
}
PUBLISHED_BERT = {
    ("a100-80", 128): (317, 580),
    ("v100-32", 128): (50, 224),
    ("a100-80", 512): (110, 210),
    ("v100-32", 512): (19, 75),
}


def print_throughput() -> None:
    print("| workload | GPU | predicted FP32/TF32 | AMP | ratio | published FP32/TF32 | AMP | ratio | error of ratio |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for (name, gpu, batch_size), published in PUBLISHED_IMAGES.items():
        model = _image_model(name)
        base = throughput(model, images(2, 224), image_loss, FP32, gpu, batch_size=batch_size)
        model = model.to(memory_format=torch.channels_last)
        batch = images(2, 224, channels_last=True)
        amp = throughput(model, batch, image_loss, AUTOCAST, gpu, batch_size=batch_size)
        _print_ratio(f"{name}, 224 px", gpu, (base, amp), published)
    for fused_attention in (False, True):
        bert = BertLarge(fused_attention=fused_attention)
        for (gpu, length), published in PUBLISHED_BERT.items():
            small, large = _bert_batches(gpu, length)
            base = throughput(bert, small, bert_loss, FP32, gpu, accumulation_steps=64)
            amp = throughput(bert, large, bert_loss, AUTOCAST, gpu, accumulation_steps=32)
            label = f"BERT-large, length {length}, attention {'fused' if fused_attention else 'written out'}"
            _print_ratio(label, gpu, (base, amp), published)


def _image_model(name: str) -> nn.Module:
    if name == "resnext101_32x4d":
        return torchvision.models.ResNet(
            torchvision.models.resnet.Bottleneck, [3, 4, 23, 3], groups=32, width_per_group=4
        )
    model: nn.Module = torchvision.models.get_model(name)
    return model


def _bert_batches(gpu: str, length: int) -> tuple[Any, Any]:
    """The published runs carry twice the batch in mixed precision."""
    size = {128: 128, 512: 16}[length] // (1 if gpu.startswith("a100") else 2)
    num_masked = {128: 20, 512: 80}[length]
    return bert_batch(size, length, num_masked), bert_batch(2 * size, length, num_masked)


def _print_ratio(label: str, gpu: str, ours: tuple[float, float], published: tuple[float, float]) -> None:
    ratio, known = ours[1] / ours[0], published[1] / published[0]
    cells = [label, gpu, f"{ours[0]:.0f}", f"{ours[1]:.0f}", f"{ratio:.2f}"]
    cells += [f"{published[0]:.0f}", f"{published[1]:.0f}", f"{known:.2f}", f"{ratio / known - 1:+.0%}"]
    print("| " + " | ".join(cells) + " |", flush=True)


PUBLISHED_FORMATS = {"resnet50": 1.47, "resnext50_32x4d": 1.51, "resnet18": 1.26, "densenet121": 1.25}
PUBLISHED_FORMATS |= {"convnext_tiny": 1.01, "regnet_x_800mf": 0.56}


def print_formats() -> None:
    print("channels_last over contiguous under autocast, RTX 3090, batch 128: predicted beside timm's tables")
    for name, published in PUBLISHED_FORMATS.items():
        model = torchvision.models.get_model(name)
        contiguous = throughput(model, images(2, 224), image_loss, AUTOCAST, "rtx-3090", batch_size=128)
        model = model.to(memory_format=torch.channels_last)
        batch = images(2, 224, channels_last=True)
        last = throughput(model, batch, image_loss, AUTOCAST, "rtx-3090", batch_size=128)
        print(f"  {name:18s} {last / contiguous:.2f}  published {published:.2f}", flush=True)


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
            f" launches {base.launch_share:.0%} of the FP32 step",
            flush=True,
        )


SECTIONS = {
    "memory": print_memory,
    "throughput": print_throughput,
    "formats": print_formats,
    "toy": print_toy,
    "exactness": print_exactness,
}

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    for section in sys.argv[1:] or SECTIONS:
        SECTIONS[section]()
