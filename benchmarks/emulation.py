"""Print what emulated FP16 costs on this CPU and how closely it follows FP32 and torch's own FP16 kernels.

    python benchmarks/emulation.py [speed] [--threads 2] [--own-steps 2]
    python benchmarks/emulation.py trajectory [--init-scale 65536] [--common-state]
    python benchmarks/emulation.py accuracy [--num-steps 200] [--num-seeds 3] [--decay]

Arms run side by side, one step each in turn; a figure is the median of its arm's steps. Every arm but fp32 runs inside
autocast to FP16 under CUDA's rules; "torch's own" computes with torch's FP16 CPU kernels.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
import torchvision
from sklearn.datasets import load_digits

from autoprec.emulation import emulate

BATCH_SIZE, IMAGE_SIZE, NUM_CLASSES = 32, 32, 10


def resnet18() -> torch.nn.Module:
    return torchvision.models.resnet18(num_classes=NUM_CLASSES)


def small_vit() -> torch.nn.Module:
    return torchvision.models.VisionTransformer(IMAGE_SIZE, 4, 4, 4, 192, 384, num_classes=NUM_CLASSES)


MODELS = {"resnet18": resnet18, "small ViT": small_vit}
ARITHMETIC: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "fp32": nullcontext,
    "emulated fp16": emulate,
    "torch's own fp16": lambda: emulate(arithmetic=False),
}


@dataclass
class Arm:
    """One model trained under one arithmetic."""

    name: str
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)

    def step(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        """Train on one batch and record the loss, the scale and the time."""
        is_half = self.name != "fp32"
        with ARITHMETIC[self.name]():
            start, cpu_start = time.perf_counter(), time.process_time()
            self.optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16, enabled=is_half):
                loss = F.cross_entropy(self.model(images), labels)
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.seconds.append(time.perf_counter() - start)
            self.cpu_seconds.append(time.process_time() - cpu_start)
        self.losses.append(loss.item())
        self.scales.append(self.scaler.get_scale())


def make_arm(
    name: str,
    make_model: Callable[[], torch.nn.Module],
    seed: int,
    optimizer: str = "adamw",
    init_scale: float = 2.0**16,
) -> Arm:
    torch.manual_seed(seed)
    model = make_model()
    kinds = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale, enabled=name != "fp32")
    return Arm(name, model, kinds[optimizer](model.parameters(), lr=1e-3 if optimizer == "adamw" else 1e-2), scaler)


def digits(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return training images and labels, then held-out ones (a quarter), at 32 px with three channels."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32)[:, None].div(8).sub(1)
    images = F.interpolate(images, size=IMAGE_SIZE, mode="bilinear").repeat(1, 3, 1, 1)
    labels = torch.tensor(data.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    held_out, train = order[: len(order) // 4], order[len(order) // 4 :]
    return images[train], labels[train], images[held_out], labels[held_out]


def batches(images: torch.Tensor, labels: torch.Tensor, num_steps: int, seed: int) -> list[tuple[torch.Tensor, ...]]:
    generator = torch.Generator().manual_seed(seed)
    picks = [torch.randint(len(labels), (BATCH_SIZE,), generator=generator) for _ in range(num_steps)]
    return [(images[pick], labels[pick]) for pick in picks]


def print_speed(num_steps: int, num_own_steps: int) -> None:
    print(f"{'model':<10} {'arm':<17} {'ms a step':>10} {'over fp32':>10} {'CPU ms':>9} {'over fp32':>10} {'steps':>6}")
    images, labels, _, _ = digits(0)
    for name, make_model in MODELS.items():
        arms = {arm: make_arm(arm, make_model, 0) for arm in ARITHMETIC}
        for index, batch in enumerate(batches(images, labels, num_steps, 0)):
            for arm in arms.values():
                if arm.name != "torch's own fp16" or index < num_own_steps:
                    arm.step(*batch)
        base = medians(arms["fp32"])
        for arm in arms.values():
            wall, cpu = medians(arm)
            figures = f"{wall:>10.1f} {wall / base[0]:>10.2f} {cpu:>9.1f} {cpu / base[1]:>10.2f} {len(arm.seconds):>6}"
            print(f"{name:<10} {arm.name:<17} {figures}", flush=True)


def medians(arm: Arm) -> tuple[float, float]:
    """Return the median wall and CPU milliseconds of a step, the first step left out where there are more."""
    wall, cpu = (statistics.median(values[1:] or values) * 1e3 for values in (arm.seconds, arm.cpu_seconds))
    return wall, cpu


def print_trajectory(num_steps: int, init_scale: float, common_state: bool) -> None:
    print(f"{'optimizer':<10} {'step':>4} {'fp32':>10} {'emulated':>10} {'own':>10} {'difference':>11} {'scales':>16}")
    images, labels, _, _ = digits(0)
    for optimizer in ("sgd", "adamw"):
        arms = {arm: make_arm(arm, resnet18, 0, optimizer, init_scale) for arm in ARITHMETIC}
        for index, batch in enumerate(batches(images, labels, num_steps, 0)):
            single, emulated, own = arms.values()
            if common_state:
                for arm in (single, own):
                    arm.model.load_state_dict(emulated.model.state_dict())
            for arm in arms.values():
                arm.step(*batch)
            difference = abs(emulated.losses[-1] - own.losses[-1]) / own.losses[-1]
            scales = f"{emulated.scales[-1]:.0f} {own.scales[-1]:.0f}"
            losses = f"{single.losses[-1]:>10.6f} {emulated.losses[-1]:>10.6f} {own.losses[-1]:>10.6f}"
            print(f"{optimizer:<10} {index + 1:>4} {losses} {difference:>10.3%} {scales:>16}", flush=True)


@torch.no_grad()
def held_out_accuracy(arm: Arm, train: torch.Tensor, images: torch.Tensor, labels: torch.Tensor) -> float:
    """Re-estimate the statistics of BatchNorm on eight batches, then classify the held-out images, in FP32."""
    for module in arm.model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.reset_running_stats()
            module.momentum = None
    for start in range(0, 8 * BATCH_SIZE, BATCH_SIZE):
        arm.model(train[start : start + BATCH_SIZE])
    arm.model.eval()
    hits = arm.model(images).argmax(-1) == labels
    arm.model.train()
    return float(hits.float().mean())


def print_accuracy(num_steps: int, num_seeds: int, decay: bool) -> None:
    print(f"{'seed':>4} {'fp32':>8} {'emulated':>9} {'difference':>11}   held-out accuracy after {num_steps} steps")
    differences = []
    for seed in range(num_seeds):
        images, labels, held_out, held_out_labels = digits(seed)
        arms = [make_arm(name, resnet18, seed) for name in ("fp32", "emulated fp16")]
        for index, batch in enumerate(batches(images, labels, num_steps, seed)):
            for arm in arms:
                arm.optimizer.param_groups[0]["lr"] = 1e-3 * (1 - index / num_steps if decay else 1)
                arm.step(*batch)
        single, half = (held_out_accuracy(arm, images, held_out, held_out_labels) for arm in arms)
        differences.append(half - single)
        print(f"{seed:>4} {single:>8.4f} {half:>9.4f} {half - single:>+11.4f}", flush=True)
    print(f"mean difference {statistics.mean(differences):+.4f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", default="speed", choices=["speed", "trajectory", "accuracy"])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--num-steps", type=int, default=None)
    parser.add_argument("--own-steps", type=int, default=2, help="steps with torch's own FP16 kernels (slow)")
    parser.add_argument("--init-scale", type=float, default=2.0**16, help="of the trajectory's GradScaler")
    parser.add_argument("--common-state", action="store_true", help="start each step from the emulated arm's weights")
    parser.add_argument("--decay", action="store_true", help="lower the accuracy runs' rate linearly to 0")
    parser.add_argument("--num-seeds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    capability = torch.backends.cpu.get_cpu_capability()
    print(
        f"torch {torch.__version__}, {options.threads} threads, {platform.machine()} with {capability}, measured here"
    )
    if options.what == "speed":
        print_speed(options.num_steps or 12, options.own_steps)
    elif options.what == "trajectory":
        print_trajectory(options.num_steps or 4, options.init_scale, options.common_state)
    else:
        print_accuracy(options.num_steps or 200, options.num_seeds, options.decay)


if __name__ == "__main__":
    main()
