"""A U-Net that finds the strokes of handwritten digits: a mask for each pixel, judged by intersection over union.

autoprec search --task examples/trainings/unet.py:task
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import autoprec


def batches(image_size: int, batch_size: int) -> tuple[list[tuple[torch.Tensor, ...]], list[tuple[torch.Tensor, ...]]]:
    """Digits drawn large, with noise on top; the mask is where the clean stroke is darker than half."""
    digits = torch.from_numpy(load_digits().images).float()[:, None] / 16
    images = F.interpolate(digits, size=(image_size, image_size), mode="bilinear")
    masks = (images > 0.5).float()
    images = images + 0.3 * torch.randn(images.shape, generator=torch.Generator().manual_seed(0))
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    train, held_out = order[:1440], order[1440:]
    return (
        list(zip(images[train].split(batch_size), masks[train].split(batch_size), strict=True)),
        list(zip(images[held_out].split(batch_size), masks[held_out].split(batch_size), strict=True)),
    )


class Block(nn.Sequential):
    def __init__(self, num_inputs: int, num_outputs: int, num_convolutions: int) -> None:
        layers: list[nn.Module] = []
        for number in range(num_convolutions):
            layers += [
                nn.Conv2d(num_outputs if number else num_inputs, num_outputs, 3, padding=1),
                nn.GroupNorm(4, num_outputs),
                nn.ReLU(inplace=True),
            ]
        super().__init__(*layers)


class UNet(nn.Module):
    def __init__(self, width: int, num_convolutions: int) -> None:
        super().__init__()
        self.down1 = Block(1, width, num_convolutions)
        self.down2 = Block(width, 2 * width, num_convolutions)
        self.middle = Block(2 * width, 4 * width, num_convolutions)
        self.expand2 = nn.ConvTranspose2d(4 * width, 2 * width, 2, stride=2)
        self.up2 = Block(4 * width, 2 * width, num_convolutions)
        self.expand1 = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.up1 = Block(2 * width, width, num_convolutions)
        self.head = nn.Conv2d(width, 1, 1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        fine = self.down1(images)
        coarse = self.down2(F.max_pool2d(fine, 2))
        deepest = self.middle(F.max_pool2d(coarse, 2))
        coarse = self.up2(torch.cat([coarse, self.expand2(deepest)], dim=1))
        fine = self.up1(torch.cat([fine, self.expand1(coarse)], dim=1))
        return self.head(fine)


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Return binary cross entropy plus the soft Dice loss."""
    images, masks = batch
    logits = model(images)
    probabilities = logits.sigmoid()
    dice = 2 * (probabilities * masks).sum() / (probabilities.sum() + masks.sum())
    return F.binary_cross_entropy_with_logits(logits, masks) + 1 - dice


def intersection_over_union(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    images, masks = batch
    found, there = model(images) > 0, masks > 0.5
    both, either = (found & there).sum((1, 2, 3)), (found | there).sum((1, 2, 3))
    return (both / either.clamp(min=1)).mean()


def task(width: int = 16, num_convolutions: int = 2, image_size: int = 32, batch_size: int = 16) -> autoprec.Task:
    train, held_out = batches(image_size, batch_size)
    return autoprec.Task(
        name="unet",
        model=lambda: UNet(width, num_convolutions),
        train_batches=train,
        eval_batches=held_out,
        loss=loss,
        metric=intersection_over_union,
        metric_name="intersection over union",
        optimizer=torch.optim.Adam,
        optimizer_settings={"lr": 2e-3},
    )
