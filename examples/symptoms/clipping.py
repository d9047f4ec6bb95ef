"""Clipping before unscale_: the limit meets gradients that are still 65536 times too large.

autoprec doctor --task examples/symptoms/clipping.py:broken
"""

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def train(unscales_first):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 8)).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler(DEVICE)
    for _ in range(12):
        x = torch.randn(64, 16, device=DEVICE)
        optimizer.zero_grad()
        with torch.autocast(DEVICE, dtype=torch.float16):
            loss = nn.functional.mse_loss(model(x), x[:, :8])
        scaler.scale(loss).backward()
        if unscales_first:
            scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()


def broken():
    train(unscales_first=False)


def sound():
    train(unscales_first=True)
