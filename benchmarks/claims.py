"""What common articles say about mixed precision in PyTorch, computed or emulated here; docs/claims.md quotes this.

    python benchmarks/claims.py [memory] [ranges] [optimizer] [norm]

Memory is computed at the target shape (224 px). Ranges are measured in a few FP32 steps at 32 px, batch 32, on images
of digits. FP16 arithmetic is emulated.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping

import torch
from torch import nn

from autoprec.apply import apply_policy
from autoprec.emulation import emulate
from autoprec.policy import OptimizerSettings, Policy, Precision
from autoprec.profiling.profile import Profile
from autoprec.profiling.run import take_profile
from autoprec.profiling.scaler_choice import scale_window
from autoprec.tasks.protocol import Task
from autoprec.tasks.source import TaskSource
from autoprec.trials.outcome import TrialSettings
from autoprec.trials.target import target_estimate
from autoprec.units import find_units

AUTOCAST = Policy(default="autocast", dtype="fp16")
FP32 = Policy(default="fp32")
SETTINGS = TrialSettings()


def vision(model: str, batch_size: int, *, image_size: int = 224, optimizer: str = "adamw") -> Task:
    arguments = {
        "model": model,
        "target_batch_size": batch_size,
        "target_image_size": image_size,
        "optimizer": optimizer,
    }
    return TaskSource("vision", arguments).build()


def gibibytes(task: Task, policy: Policy) -> float:
    return target_estimate(task, policy, SETTINGS).peak_memory_bytes.value / 2**30


def memory() -> None:
    resnet, vit = vision("resnet50", 128), vision("vit_b_16", 64)
    ffn: Mapping[str, Precision] = {"encoder.layers.*.mlp*": "fp32"}
    deep: Mapping[str, Precision] = {"layer3*": "fp32", "layer4*": "fp32", "fc": "fp32"}
    amsgrad = AUTOCAST.replace(optimizer=OptimizerSettings(eps=1e-7, amsgrad=True))
    show("resnet50, batch 128, AdamW", resnet, {
        "fp32": FP32,
        "autocast": AUTOCAST,
        "autocast, layer3, layer4 and fc in fp32": AUTOCAST.replace(modules=dict(deep)),
        "autocast, eps 1e-7 and amsgrad": amsgrad,
    })  # fmt: skip
    show("vit_b_16, batch 64, AdamW", vit, {
        "fp32": FP32,
        "autocast": AUTOCAST,
        "autocast, feed-forward parts in fp32": AUTOCAST.replace(modules=dict(ffn)),
        "half everywhere": Policy(default="fp16"),
    })  # fmt: skip
    small = vision("resnet50", 32, image_size=32)
    show("resnet50, batch 32, 32 px, AdamW", small, {"fp32": FP32, "autocast": AUTOCAST})


def show(title: str, task: Task, policies: Mapping[str, Policy]) -> None:
    first = None
    for name, policy in policies.items():
        size = gibibytes(task, policy)
        first = first or size
        print(f"{title}: {name}: {size:.3f} GiB computed, {size / first - 1:+.1%} against fp32", flush=True)


def ranges() -> None:
    for name in ("resnet50", "vit_b_16"):
        task = vision(name, 128 if name == "resnet50" else 64)
        torch.manual_seed(0)
        model = task.model()
        batch = next(iter(task.train_batches() if callable(task.train_batches) else task.train_batches))
        units = find_units(model, run=lambda module, task=task, batch=batch: task.loss(module, batch))
        kinds = {unit.name: unit.type for unit in units}
        profile = take_profile(task, list(kinds), SETTINGS)
        report_ranges(name, profile, kinds)


def report_ranges(name: str, profile: Profile, kinds: Mapping[str, str]) -> None:
    products = {n: u for n, u in profile.units.items() if kinds[n] in ("Conv2d", "Linear", "MultiheadAttention")}
    rooms = {n: u.headroom_octaves for n, u in products.items() if u.headroom_octaves is not None}
    window = scale_window(profile.gradients)
    safe = sum(room > 1 and not products[n].overflows for n, room in rooms.items())
    least = min(rooms, key=rooms.__getitem__)
    print(f"{name}: {safe} of {len(rooms)} products have over an octave of headroom; least: {least} {rooms[least]:.1f}")
    print(f"{name}: safe window of init_scale 2^{math.log2(window.low):.0f} to 2^{math.log2(window.high):.0f}")
    for scale in (1.0, 1024.0, 32768.0, 65536.0):
        gradients = profile.gradients
        above = max(0.0, math.log2(gradients.maximum * scale / 65504.0))
        flushed = gradients.share_below(scale)
        print(f"{name}: scale {scale:g}: {flushed:.3%} of gradients flushed, the largest {above:.1f} octaves too large")
    worst = sorted(profile.units, key=lambda n: -profile.units[n].error_score())[:3]
    print(f"{name}: largest error scores: " + ", ".join(f"{n} {profile.units[n].error_score():.1e}" for n in worst))


def optimizer() -> None:
    """Adam's first step from one gradient, by the dtype of the weights and eps."""
    for dtype in (torch.float32, torch.float16):
        for eps in (1e-8, 1e-7, 1e-4):
            weight = nn.Parameter(torch.ones(3, dtype=dtype))
            weight.grad = torch.tensor([0.0, 1e-4, 1e-2], dtype=dtype)
            torch.optim.AdamW([weight], lr=1e-3, eps=eps, weight_decay=0.0, foreach=False).step()
            print(f"weights {dtype}, eps {eps:g}: 1 becomes {[round(float(w), 4) for w in weight.detach()]}")


def norm() -> None:
    """BatchNorm with half input and FP32 statistics, and fed with values beyond FP16."""
    torch.manual_seed(0)
    for scale in (1.0, 100.0, 1e5):
        x = scale * torch.randn(64, 8)
        reference, model = nn.BatchNorm1d(8), nn.BatchNorm1d(8)
        apply_policy(model, Policy(default="fp16"))
        with emulate():
            y = model(x)
        error = float((y - reference(x)).detach().abs().max())
        finite = bool(torch.isfinite(model.running_var).all())
        print(
            f"BatchNorm in fp16, inputs of size {scale:g}: difference to fp32 {error:.1e}, finite statistics: {finite}"
        )


PARTS = {"memory": memory, "ranges": ranges, "optimizer": optimizer, "norm": norm}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    arguments = parser.parse_args()
    for part in arguments.parts or PARTS:
        print(f"-- {part}", flush=True)
        PARTS[part]()


if __name__ == "__main__":
    main()
