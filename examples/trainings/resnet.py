"""A ResNet of torchvision's blocks for small images: SGD, one-cycle schedule, label smoothing, gradient clipping.

autoprec search --task examples/trainings/resnet.py:task
"""

import torch
import torch.nn.functional as F
from torch import nn
from torchvision.models.resnet import BasicBlock, conv1x1

import autoprec
from autoprec.tasks.images import image_batches


class ResNet(nn.Module):
    """Stages of residual blocks, each after the first at half the size and twice the width."""

    def __init__(self, width: int, num_stages: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        self.stages = nn.Sequential(*(self.build_stage(width, stage) for stage in range(num_stages)))
        self.head = nn.Linear(width * 2 ** (num_stages - 1), 10)

    def build_stage(self, width: int, stage: int) -> nn.Module:
        if stage == 0:
            return nn.Sequential(BasicBlock(width, width), BasicBlock(width, width))
        before, after = width * 2 ** (stage - 1), width * 2**stage
        shortcut = nn.Sequential(conv1x1(before, after, stride=2), nn.BatchNorm2d(after))
        return nn.Sequential(BasicBlock(before, after, stride=2, downsample=shortcut), BasicBlock(after, after))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.stages(self.stem(images)).mean((2, 3)))


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    images, labels = batch
    return F.cross_entropy(model(images), labels, label_smoothing=0.1)


def accuracy(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    images, labels = batch
    return (model(images).argmax(1) == labels).float().mean()


def one_cycle(optimizer: torch.optim.Optimizer, num_steps: int) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=num_steps)


def task(width: int = 32, num_stages: int = 3, image_size: int = 32, batch_size: int = 32) -> autoprec.Task:
    train, held_out = image_batches("digits", image_size=image_size, batch_size=batch_size)
    return autoprec.Task(
        name="resnet",
        model=lambda: ResNet(width, num_stages),
        train_batches=train,
        eval_batches=held_out,
        loss=loss,
        metric=accuracy,
        optimizer=torch.optim.SGD,
        optimizer_settings={"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 5e-4},
        scheduler=one_cycle,
        max_grad_norm=1.0,
    )
