"""The emulation against CUDA: the dtypes that each unit computes in, and the losses of equal trainings.

On a CPU torch's own FP16 kernels stand in for CUDA; they are slow, so that fewer steps are compared.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import torchvision
from torch import nn

from autoprec import Policy, apply_policy, build_grad_scaler, emulate
from autoprec.probes.dtypes import watch_dtypes
from gpu_parts import Context

__all__ = ["compare_emulation"]

POLICIES = {
    "autocast fp16": Policy(default="autocast", dtype="fp16"),
    "fp16": Policy(default="fp16"),
    "mixed": Policy(default="autocast", modules={"encoder": "fp16", "layer1": "fp16", "layer4": "fp32"}),
}


def small_vit() -> nn.Module:
    return torchvision.models.VisionTransformer(32, 8, 2, 4, 64, 128, num_classes=10)


def resnet18() -> nn.Module:
    return torchvision.models.resnet18(num_classes=10)


MODELS: dict[str, Callable[[], nn.Module]] = {"small_vit": small_vit, "resnet18": resnet18}


@dataclass
class Side:
    """One of the two that are compared: where it computes, and in what arithmetic."""

    name: str
    device: torch.device
    arithmetic: Callable[[], contextlib.AbstractContextManager[Any]]


def compare_emulation(context: Context) -> list[dict[str, Any]]:
    """Train both sides from the same weights on the same batches; print differences of dtypes and losses."""
    cpu = torch.device("cpu")
    emulated = Side("emulated", cpu, emulate)
    other = (
        Side("CUDA", context.device, contextlib.nullcontext)
        if context.is_cuda
        else Side("torch's own FP16 on a CPU", cpu, lambda: emulate(arithmetic=False))
    )
    num_steps = 3 if context.quick else 50
    print(f"\nemulated beside {other.name}, {num_steps} steps of SGD from the same weights")
    print(f"{'model':<12}{'policy':<16}{'units':>6}{'other dtypes':>14}{'first loss':>12}{'worst loss':>12}")
    results = []
    for model_name, build in MODELS.items():
        for label, policy in _fitting(build, context).items():
            dtypes, losses = zip(*(_train(build, policy, side, num_steps) for side in (emulated, other)), strict=True)
            differing = sorted(name for name in dtypes[0] if dtypes[0][name] != dtypes[1].get(name))
            gaps = [abs(a - b) / abs(b) for a, b in zip(*losses, strict=True)]
            row = {
                "model": model_name,
                "policy": label,
                "num_units": len(dtypes[0]),
                "differing_dtypes": differing,
                "relative_loss_differences": gaps,
                "beside": other.name,
            }
            results.append(row)
            shown = f"{len(dtypes[0]):>6}{len(differing):>14}{gaps[0]:>12.4%}{max(gaps):>12.3%}"
            print(f"{model_name:<12}{label:<16}{shown}", flush=True)
            context.results["emulation"] = results
    return results


def _fitting(build: Callable[[], nn.Module], context: Context) -> dict[str, Policy]:
    """Return the policies, their rules cut down to the modules of this model."""
    names = {name for name, _ in build().named_modules()}
    fitting = {
        label: policy.replace(modules={name: choice for name, choice in policy.modules.items() if name in names})
        for label, policy in POLICIES.items()
    }
    return {"mixed": fitting["mixed"]} if context.quick else fitting


def _train(
    build: Callable[[], nn.Module], policy: Policy, side: Side, num_steps: int
) -> tuple[dict[str, frozenset[torch.dtype]], list[float]]:
    torch.manual_seed(0)
    model = build().to(side.device)
    apply_policy(model, policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = build_grad_scaler(policy, device=side.device)
    generator = torch.Generator().manual_seed(0)
    losses: list[float] = []
    dtypes: dict[str, frozenset[torch.dtype]] = {}
    with side.arithmetic():
        for step in range(num_steps):
            images = torch.randn(16, 3, 32, 32, generator=generator).to(side.device)
            labels = torch.randint(10, (16,), generator=generator).to(side.device)
            optimizer.zero_grad()
            with watch_dtypes(model) if step == 0 else contextlib.nullcontext() as log:
                loss = F.cross_entropy(model(images), labels)
            if log is not None:
                dtypes = {name: frozenset(unit.outputs) for name, unit in log.units.items() if unit.num_calls}
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss.item())
    return dtypes, losses
