"""torchvision's VisionTransformer on digits of 32 pixels; memory and speed are those of batches of 256.

autoprec search --task examples/trainings/vit.py:task
"""

import torch
import torch.nn.functional as F
from torch import nn
from torchvision.models import VisionTransformer

import autoprec
from autoprec.tasks import TargetShape
from autoprec.tasks.images import image_batches


def build_model(width: int, num_layers: int, image_size: int) -> nn.Module:
    return VisionTransformer(
        image_size=image_size,
        patch_size=8,
        num_layers=num_layers,
        num_heads=4,
        hidden_dim=width,
        mlp_dim=2 * width,
        num_classes=10,
        dropout=0.1,
    )


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def accuracy(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    images, labels = batch
    return (model(images).argmax(1) == labels).float().mean()


def task(
    width: int = 64, num_layers: int = 4, image_size: int = 32, batch_size: int = 32, target_batch_size: int = 256
) -> autoprec.Task:
    train, held_out = image_batches("digits", image_size=image_size, batch_size=batch_size)
    return autoprec.Task(
        name="vit",
        model=lambda: build_model(width, num_layers, image_size),
        train_batches=train,
        eval_batches=held_out,
        loss=loss,
        metric=accuracy,
        optimizer_settings={"lr": 1e-3, "weight_decay": 0.05},
        max_grad_norm=1.0,
        target=TargetShape(make_batch=lambda: train.first(target_batch_size), batch_size=target_batch_size),
    )
