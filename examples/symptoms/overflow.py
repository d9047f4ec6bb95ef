"""An overflowing feed-forward block: autocast computes its products in FP16, which ends at 65504.

autoprec doctor --task examples/symptoms/overflow.py:broken
"""

import torch
from torch import nn

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Block(nn.Module):
    """A residual feed-forward block whose hidden values are large, as they grow in long trainings."""

    def __init__(self, in_fp32):
        super().__init__()
        self.feed_forward = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 32))
        self.norm = nn.LayerNorm(32)
        self.in_fp32 = in_fp32
        with torch.no_grad():
            self.feed_forward[0].weight.mul_(1000)
            self.feed_forward[2].weight.mul_(1000)

    def forward(self, x):
        with torch.autocast(DEVICE, enabled=torch.is_autocast_enabled(DEVICE) and not self.in_fp32):
            added = self.feed_forward(x.float() if self.in_fp32 else x)
        return self.norm(x + added)


def train(in_fp32):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), Block(in_fp32), nn.Linear(32, 8)).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=1024)
    for _ in range(12):
        x = torch.randn(64, 16, device=DEVICE)
        optimizer.zero_grad()
        with torch.autocast(DEVICE, dtype=torch.float16):
            loss = nn.functional.mse_loss(model(x), x[:, :8])
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


def broken():
    train(in_fp32=False)


def sound():
    train(in_fp32=True)
