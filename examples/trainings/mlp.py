"""An MLP on scikit-learn's breast cancer data: the shortest kind of task.

autoprec search --task examples/trainings/mlp.py:task
"""

import torch
import torch.nn.functional as F
from torch import nn

import autoprec
from autoprec.tasks.tabular import tabular_batches


def build_model(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(30, width),
        nn.LayerNorm(width),
        nn.SiLU(),
        nn.Dropout(0.1),
        nn.Linear(width, width),
        nn.SiLU(),
        nn.Linear(width, 1),
    )


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    columns, labels = batch
    return F.binary_cross_entropy_with_logits(model(columns).squeeze(1), labels.float())


def accuracy(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    columns, labels = batch
    return ((model(columns).squeeze(1) > 0) == (labels > 0)).float().mean()


def task(width: int = 64, batch_size: int = 32) -> autoprec.Task:
    train, held_out = tabular_batches("breast_cancer", batch_size=batch_size)
    return autoprec.Task(
        name="mlp",
        model=lambda: build_model(width),
        train_batches=train,
        eval_batches=held_out,
        loss=loss,
        metric=accuracy,
    )
