"""A byte-level GPT on CPython's documentation: tied embedding, warm-up and cosine, two micro-batches a step.

autoprec search --task examples/trainings/gpt.py:task
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

import autoprec
from autoprec.tasks.text import NUM_BYTES, language_batches


class Block(nn.Module):
    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.qkv(self.norm1(x)).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, width: int, num_layers: int, num_heads: int, length: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(NUM_BYTES, width)
        self.positions = nn.Parameter(0.02 * torch.randn(length, width))
        self.blocks = nn.ModuleList(Block(width, num_heads) for _ in range(num_layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, NUM_BYTES, bias=False)
        self.head.weight = self.tokens.weight
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    inputs, targets = batch
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def bits_per_byte(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return loss(model, batch) / math.log(2)


def build_optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Decay the matrices alone."""
    parameters = list(parameters)
    matrices = [p for p in parameters if p.ndim >= 2]
    others = [p for p in parameters if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95))


def warm_up_and_cosine(optimizer: torch.optim.Optimizer, num_steps: int) -> torch.optim.lr_scheduler.LRScheduler:
    num_warmup = max(1, num_steps // 10)

    def factor(step: int) -> float:
        done = (step - num_warmup) / max(1, num_steps - num_warmup)
        return (step + 1) / num_warmup if step < num_warmup else 0.5 * (1 + math.cos(math.pi * done))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def task(
    data: str = "topics", width: int = 64, num_layers: int = 4, length: int = 64, batch_size: int = 16
) -> autoprec.Task:
    train, held_out = language_batches(data, length=length, batch_size=batch_size)
    return autoprec.Task(
        name="gpt",
        model=lambda: GPT(width, num_layers, num_heads=4, length=length),
        train_batches=train,
        eval_batches=held_out,
        loss=loss,
        metric=bits_per_byte,
        metric_name="bits per byte",
        metric_direction="minimize",
        optimizer=build_optimizer,
        scheduler=warm_up_and_cosine,
        max_grad_norm=1.0,
        accumulation_steps=2,
    )
