"""Poisoned BatchNorm: one batch overflows; the scaler skips its step, the running statistics keep its inf.

autoprec doctor --task examples/symptoms/batchnorm.py:broken
"""

import torch
from torch import nn

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def train(limit):
    torch.manual_seed(0)
    features = (nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    model = nn.Sequential(*features, nn.Linear(16, 8)).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(DEVICE)
    for step in range(12):
        images = torch.randn(16, 8, 8, 8, device=DEVICE)
        if step == 6:
            images[0] *= 100_000  # one broken image
        labels = torch.randint(8, (16,), device=DEVICE)
        optimizer.zero_grad()
        with torch.autocast(DEVICE, dtype=torch.float16):
            loss = nn.functional.cross_entropy(model(images.clamp(-limit, limit)), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


def broken():
    train(limit=float("inf"))


def sound():
    train(limit=5.0)
