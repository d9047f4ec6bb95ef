"""A loss in half: the model's FP16 output goes into a loss outside of autocast.

autoprec doctor --task examples/symptoms/half_loss.py:broken
"""

import torch
from torch import nn

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def train(in_fp32):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 8)).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler(DEVICE)
    for _ in range(12):
        x = torch.randn(64, 16, device=DEVICE)
        labels = x[:, :8].argmax(1)
        optimizer.zero_grad()
        with torch.autocast(DEVICE, dtype=torch.float16):
            output = model(x)
        loss = nn.functional.cross_entropy(output.float() if in_fp32 else output, labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


def broken():
    train(in_fp32=False)


def sound():
    train(in_fp32=True)
