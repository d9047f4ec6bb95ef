"""A small CNN on scikit-learn's digits, with a DataLoader.

autoprec search --task examples/trainings/cnn.py:task
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

import autoprec


def loaders(batch_size: int) -> tuple[DataLoader, DataLoader]:
    data = load_digits()
    images = torch.from_numpy(data.images).float()[:, None] / 16
    dataset = TensorDataset(images, torch.from_numpy(data.target))
    train, held_out = random_split(dataset, [0.8, 0.2], generator=torch.Generator().manual_seed(0))
    return DataLoader(train, batch_size, shuffle=True, drop_last=True), DataLoader(held_out, 100)


def build_model(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, padding=1, bias=False),
        nn.BatchNorm2d(2 * width),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.1),
        nn.Linear(2 * width * 16, 10),
    )


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def accuracy(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    images, labels = batch
    return (model(images).argmax(1) == labels).float().mean()


def task(width: int = 32, batch_size: int = 32) -> autoprec.Task:
    train, held_out = loaders(batch_size)
    return autoprec.Task(
        name="cnn",
        model=lambda: build_model(width),
        train_batches=train,
        eval_batches=held_out,
        loss=loss,
        metric=accuracy,
    )
