"""FP16 parameters: model.half() instead of autocast; AdamW's eps is 0 there.

autoprec doctor --task examples/symptoms/half_parameters.py:broken
"""

import torch
from torch import nn

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def broken():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 8)).to(DEVICE).half()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(12):
        x = torch.randn(64, 16, device=DEVICE)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x.half()).float(), x[:, :8])
        loss.backward()
        optimizer.step()


def sound():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 8)).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler(DEVICE)
    for _ in range(12):
        x = torch.randn(64, 16, device=DEVICE)
        optimizer.zero_grad()
        with torch.autocast(DEVICE, dtype=torch.float16):
            loss = nn.functional.mse_loss(model(x), x[:, :8])
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
