"""Vanishing gradients: a small loss under FP16 without a grad scaler; what is below 6e-8 rounds to 0.

autoprec doctor --task examples/symptoms/vanishing.py:broken
"""

import torch
from torch import nn

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def train(scales):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler(DEVICE, enabled=scales)
    for _ in range(12):
        x = torch.randn(64, 16, device=DEVICE)
        optimizer.zero_grad()
        with torch.autocast(DEVICE, dtype=torch.float16):
            loss = 1e-5 * nn.functional.mse_loss(model(x), x[:, :8])  # one small term of many
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


def broken():
    train(scales=False)


def sound():
    train(scales=True)
