"""Training under emulation beside torch's own FP16 kernels and FP32, from one start."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autoprec.emulation import emulate


def small_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2), nn.Flatten(), nn.Linear(72, 10)
    )


def train(
    model: nn.Module, images: torch.Tensor, labels: torch.Tensor, *, num_steps: int, arithmetic: bool, init_scale: float
) -> tuple[list[float], list[float]]:
    """Return the losses and the loss scales of a run in autocast to FP16 under CUDA's rules."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale, growth_interval=3)
    losses, scales = [], []
    with emulate(arithmetic=arithmetic):
        for _ in range(num_steps):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                loss = F.cross_entropy(model(images), labels)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss.item())
            scales.append(scaler.get_scale())
    return losses, scales


def scales_of_both(
    make: Callable[[], nn.Module], images: torch.Tensor, labels: torch.Tensor, *, num_steps: int, init_scale: float
) -> list[float]:
    """Hold losses and scales against torch's own kernels and return the scales."""
    runs = []
    for arithmetic in (True, False):
        torch.manual_seed(0)
        model = make()
        runs.append(train(model, images, labels, num_steps=num_steps, arithmetic=arithmetic, init_scale=init_scale))
    (losses, scales), (own_losses, own_scales) = runs
    assert losses[:3] == pytest.approx(own_losses[:3], rel=1e-3)
    assert scales == own_scales
    return scales


def test_a_small_net_follows_torch_s_own_fp16_kernels() -> None:
    generator = torch.Generator().manual_seed(0)
    images, labels = torch.randn(16, 1, 9, 9, generator=generator), torch.arange(16) % 10
    scales = scales_of_both(small_net, images, labels, num_steps=8, init_scale=2.0**20)
    assert scales[:5] == [2.0**19, 2.0**19, 2.0**19, 2.0**20, 2.0**19]  # a skip, three good steps, growth, a skip


@pytest.mark.slow
def test_resnet18_steps_from_a_common_state_follow_torch_s_own_fp16_kernels() -> None:
    import torchvision
    from sklearn.datasets import load_digits

    data = load_digits()
    images = F.interpolate(torch.tensor(data.images[:8], dtype=torch.float32)[:, None] / 8 - 1, size=32)
    images, labels = images.repeat(1, 3, 1, 1), torch.tensor(data.target[:8])
    torch.manual_seed(0)
    model, own = (torchvision.models.resnet18(num_classes=10) for _ in range(2))
    for init_scale in (2.0**10, 2.0**10, 2.0**24):
        own.load_state_dict(model.state_dict())
        runs = [
            train(m, images, labels, num_steps=1, arithmetic=arithmetic, init_scale=init_scale)
            for m, arithmetic in ((model, True), (own, False))
        ]
        assert runs[0][0] == pytest.approx(runs[1][0], rel=1e-3)
        assert runs[0][1] == runs[1][1] == [2.0**10 if init_scale == 2.0**10 else 2.0**23]


def test_ten_steps_follow_fp32() -> None:
    generator = torch.Generator().manual_seed(0)
    images, labels = torch.randn(16, 1, 9, 9, generator=generator), torch.arange(16) % 10
    torch.manual_seed(0)
    losses, _ = train(small_net(), images, labels, num_steps=10, arithmetic=True, init_scale=2.0**10)
    torch.manual_seed(0)
    model = small_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for index in range(10):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        assert losses[index] == pytest.approx(loss.item(), rel=2e-2)
    assert losses[-1] < 0.8 * losses[0]
