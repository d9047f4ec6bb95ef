"""A GAN on digits: two networks, two losses, two optimizers, judged by the statistics of what it draws.

autoprec search --task examples/trainings/gan.py:task
"""

import torch
import torch.nn.functional as F
from torch import nn

import autoprec
from autoprec.tasks.images import image_batches

NUM_LATENTS = 16


class GAN(nn.Module):
    """Draws 8 x 8 images from latents, and tells real images from drawn ones."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.generator = nn.Sequential(
            nn.Linear(NUM_LATENTS, 2 * width * 4),
            nn.Unflatten(1, (2 * width, 2, 2)),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(),
            nn.ConvTranspose2d(2 * width, width, 4, stride=2, padding=1),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.ConvTranspose2d(width, 1, 4, stride=2, padding=1),
        )
        self.discriminator = nn.Sequential(
            nn.Conv2d(1, width, 4, stride=2, padding=1),
            nn.LeakyReLU(0.2),
            nn.Conv2d(width, 2 * width, 4, stride=2, padding=1),
            nn.LeakyReLU(0.2),
            nn.Flatten(),
            nn.Linear(2 * width * 4, 1),
        )

    def forward(self, latents: torch.Tensor) -> torch.Tensor:
        return self.generator(latents)


def draw_latents(images: torch.Tensor) -> torch.Tensor:
    return torch.randn(len(images), NUM_LATENTS, device=images.device)


def discriminator_loss(model: GAN, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    real = batch[0][:, :1]
    with torch.no_grad():
        drawn = model.generator(draw_latents(real))
    return F.softplus(-model.discriminator(real)).mean() + F.softplus(model.discriminator(drawn)).mean()


def generator_loss(model: GAN, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    drawn = model.generator(draw_latents(batch[0]))
    return F.softplus(-model.discriminator(drawn)).mean()


def pixel_distance(model: GAN, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Return how far the mean image of a batch of drawn digits is from that of real ones."""
    real = batch[0][:, :1]
    latents = torch.randn(len(real), NUM_LATENTS, generator=torch.Generator().manual_seed(0)).to(real.device)
    drawn = model(latents)
    return (drawn.mean(0) - real.mean(0)).square().mean().sqrt()


def adam(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-3, betas=(0.5, 0.999))


def task(width: int = 32, batch_size: int = 64) -> autoprec.Task:
    train, held_out = image_batches("digits", image_size=8, batch_size=batch_size)
    return autoprec.Task(
        name="gan",
        model=lambda: GAN(width),
        train_batches=train,
        eval_batches=held_out,
        loss=generator_loss,
        losses={"discriminator": discriminator_loss, "generator": generator_loss},
        metric=pixel_distance,
        metric_name="pixel distance",
        metric_direction="minimize",
        optimizer={"discriminator": adam, "generator": adam},
    )
