"""A task for `autoprec search`: train a small convolutional network on scikit-learn's digits.

    autoprec search --task vision.py:task --n-trials 4

Each part below is an example: put your own model, data, loss and metric in its place.
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import autoprec


def build_model():
    """Return a fresh model. It is called for each trial, with the seed set: no global random state of your own."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 10),
    )


def load_data():
    """Return (training, held-out) data, each as images (n, 1, 8, 8) and labels (n,)."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    train, held_out = order[:1400], order[1400:]
    return (images[train], labels[train]), (images[held_out], labels[held_out])


def loss(model, batch):
    """Return the loss of one batch as a scalar tensor. No autocast here: the policy decides the precision."""
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def accuracy(model, batch):
    """Return the mean of the metric over one held-out batch. Larger is better, or metric_direction says otherwise."""
    images, labels = batch
    return (model(images).argmax(1) == labels).float().mean()


def task():
    """Return the whole training; this is the function that --task names."""
    (images, labels), (held_out_images, held_out_labels) = load_data()

    def train_batches():
        """Yield one epoch. Whatever is random in it comes from torch's global random state."""
        for indices in torch.randperm(len(images)).split(32):
            yield images[indices], labels[indices]

    return autoprec.Task(
        name="digits-cnn",
        model=build_model,
        train_batches=train_batches,  # or a list of batches, or a DataLoader
        eval_batches=[(held_out_images, held_out_labels)],
        loss=loss,
        metric=accuracy,
        optimizer=torch.optim.AdamW,
        optimizer_settings={"lr": 1e-3, "weight_decay": 0.01},
        # scheduler=lambda optimizer, num_steps: torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=num_steps),
        # max_grad_norm=1.0,       # clip gradients
        # accumulation_steps=2,    # batches to one optimizer step
        # settings={"data": "digits, version 1"},  # what else decides the numbers: other settings are another study
        # Memory and speed are those of the real run. Where its batches are larger than those of the trials:
        # target=TargetShape(make_batch=lambda: ..., batch_size=256),  # from autoprec.tasks
    )
