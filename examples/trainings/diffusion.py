"""A diffusion model on digits: a U-Net that is told how noisy an image is, and finds the noise in it.

autoprec search --task examples/trainings/diffusion.py:task
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

import autoprec
from autoprec.tasks.images import image_batches

NUM_TIMES = 1000


def embed_times(times: torch.Tensor, width: int) -> torch.Tensor:
    """Return sines and cosines (n, width) of times (n); BF16 has no 999, so the times themselves stay FP32."""
    rates = torch.exp(torch.arange(width // 2, device=times.device) * (-math.log(10000.0) / (width // 2)))
    angles = times[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], dim=1)


class Block(nn.Module):
    def __init__(self, num_inputs: int, num_outputs: int, time_width: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(num_inputs, num_outputs, 3, padding=1)
        self.second = nn.Conv2d(num_outputs, num_outputs, 3, padding=1)
        self.norm1, self.norm2 = nn.GroupNorm(4, num_outputs), nn.GroupNorm(4, num_outputs)
        self.time = nn.Linear(time_width, num_outputs)

    def forward(self, images: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        hidden = F.silu(self.norm1(self.first(images))) + self.time(time)[:, :, None, None]
        return F.silu(self.norm2(self.second(hidden)))


class TimedUNet(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.time = nn.Sequential(nn.Linear(width, 4 * width), nn.SiLU(), nn.Linear(4 * width, 4 * width))
        self.down = Block(1, width, 4 * width)
        self.middle = Block(width, 2 * width, 4 * width)
        self.expand = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.up = Block(2 * width, width, 4 * width)
        self.head = nn.Conv2d(width, 1, 1)

    def forward(self, images: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
        time = self.time(embed_times(times, self.width))
        fine = self.down(images, time)
        coarse = self.middle(F.max_pool2d(fine, 2), time)
        return self.head(self.up(torch.cat([fine, self.expand(coarse)], dim=1), time))


def noise_error(model: nn.Module, images: torch.Tensor, times: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Return the squared error of the noise found, on the cosine schedule: at time 0 no noise, at the last no image."""
    angles = (times / NUM_TIMES * (math.pi / 2))[:, None, None, None]
    return F.mse_loss(model(angles.cos() * images + angles.sin() * noise, times), noise)


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    images = batch[0][:, :1]
    times = torch.rand(len(images), device=images.device) * NUM_TIMES
    return noise_error(model, images, times, torch.randn_like(images))


def held_out_error(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Return the error at evenly spread times and with the same noise each time, so that policies are comparable."""
    images = batch[0][:, :1]
    times = torch.linspace(0, NUM_TIMES - 1, len(images), device=images.device)
    noise = torch.randn(images.shape, generator=torch.Generator().manual_seed(0)).to(images.device)
    return noise_error(model, images, times, noise)


def task(width: int = 32, image_size: int = 16, batch_size: int = 64) -> autoprec.Task:
    train, held_out = image_batches("digits", image_size=image_size, batch_size=batch_size)
    return autoprec.Task(
        name="diffusion",
        model=lambda: TimedUNet(width),
        train_batches=train,
        eval_batches=held_out,
        loss=loss,
        metric=held_out_error,
        metric_name="noise error",
        metric_direction="minimize",
        optimizer_settings={"lr": 2e-3},
        max_grad_norm=1.0,
    )
