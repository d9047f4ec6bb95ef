"""Keep a training loop of your own: the search uses its functions, and the loop trains under what was found.

    autoprec search --task loop.py:task --n-trials 4     # finds runs/digits-mlp-.../policy.json
    python loop.py runs/digits-mlp-.../policy.json       # trains with it; without a policy in FP32

Everything from build_model to loss is shared by the two: put your own in its place.
"""

import sys

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import autoprec

NUM_EPOCHS = 3
SETTINGS = {"lr": 1e-3, "weight_decay": 0.01}


def build_model():
    """Return a fresh model."""
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))


def load_data():
    """Return (training, held-out) data, each as pixels (n, 64) and labels (n,)."""
    digits = load_digits()
    pixels, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    order = torch.randperm(len(pixels), generator=torch.Generator().manual_seed(0))
    train, held_out = order[:1400], order[1400:]
    return (pixels[train], labels[train]), (pixels[held_out], labels[held_out])


def batches(data):
    """Yield one epoch in an order drawn from torch's global random state."""
    pixels, labels = data
    for indices in torch.randperm(len(pixels)).split(32):
        yield pixels[indices], labels[indices]


def loss(model, batch):
    """Return the loss of one batch as a scalar tensor. No autocast here: the policy decides the precision."""
    pixels, labels = batch
    return F.cross_entropy(model(pixels), labels)


def accuracy(model, batch):
    """Return the share of right answers in one batch."""
    pixels, labels = batch
    return (model(pixels).argmax(1) == labels).float().mean()


def task():
    """Describe the same training to the search; this is the function that --task names."""
    train, held_out = load_data()
    return autoprec.Task(
        name="digits-mlp",
        model=build_model,
        train_batches=lambda: batches(train),
        eval_batches=[held_out],
        loss=loss,
        metric=accuracy,
        optimizer=torch.optim.AdamW,
        optimizer_settings=SETTINGS,
    )


def main(policy_file=None):
    """Train as before; what is new are the four lines that name the policy, and the scaler."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    policy = autoprec.load_policy(policy_file) if policy_file else autoprec.Policy(default="fp32")
    train, held_out = load_data()
    model = autoprec.apply_policy(build_model().to(device), policy)  # before torch.compile, DDP or fully_shard
    optimizer = autoprec.build_optimizer(policy, torch.optim.AdamW, model.parameters(), **SETTINGS)
    scaler = autoprec.build_grad_scaler(policy, device=device)  # switched off where the policy has no FP16
    for epoch in range(NUM_EPOCHS):
        for batch in batches(train):
            optimizer.zero_grad()
            value = loss(model, [tensor.to(device) for tensor in batch])
            scaler.scale(value).backward()
            # to clip: scaler.unscale_(optimizer), then torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        with torch.no_grad(), autoprec.suspend_policy(model):  # validate in FP32; leave it out to validate as trained
            right = accuracy(model, [tensor.to(device) for tensor in held_out])
        print(f"epoch {epoch + 1}: loss {value.item():.4f}, accuracy {right.item():.4f}")


if __name__ == "__main__":
    main(*sys.argv[1:2])
