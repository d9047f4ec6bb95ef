"""Small networks that learn within a few hundred steps, and two units in each of them that only FP16 harms."""

from __future__ import annotations

import functools

import torch
from proof_studies.networks import FaintGradient
from torch import nn
from torch.nn import functional as F

__all__ = ["CharacterLSTM", "ConvNet", "LanguageModel", "Perceptron", "UNet", "VisionTransformer"]


class Faint(nn.Module):
    """A layer whose gradients vanish in FP16: it and all before it stay as they were at the start."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = FaintGradient.apply(self.layer(x))
        return y


class Loud(nn.Module):
    """A layer with outputs of some thousands, which the norm behind it brings back; a cubed one swells in training."""

    def __init__(self, layer: nn.Module, gain: float, *, is_cubed: bool = False) -> None:
        super().__init__()
        self.layer = layer
        self.gain = gain
        self.is_cubed = is_cubed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layer(x)
        return (y * y * y if self.is_cubed else y) * self.gain


class ConvNet(nn.Module):
    """Three convolutions with BatchNorm, the last two of them residual; 8 x 8 images, 10 classes."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        convolution = functools.partial(nn.Conv2d, width, width, 3, padding=1, bias=False)
        self.stem = Faint(nn.Conv2d(1, width, 3, stride=2, padding=1, bias=False))
        self.norm1 = nn.BatchNorm2d(width)
        self.blocks = nn.Sequential(
            _Residual(convolution(), width), _Residual(Loud(convolution(), 350.0, is_cubed=True), width)
        )
        self.head = nn.Linear(width * 4, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.blocks(F.relu(self.norm1(self.stem(images))))
        y: torch.Tensor = self.head(F.max_pool2d(x, 2).flatten(1))
        return y


class _Residual(nn.Module):
    def __init__(self, convolution: nn.Module, width: int) -> None:
        super().__init__()
        self.convolution = convolution
        self.norm = nn.BatchNorm2d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.relu(self.norm(self.convolution(x)))


class Attention(nn.Module):
    """Written out, so that its softmax is a module of its own."""

    def __init__(self, width: int, num_heads: int, is_causal: bool) -> None:
        super().__init__()
        self.num_heads, self.is_causal = num_heads, is_causal
        self.qkv = nn.Linear(width, 3 * width)
        self.softmax = nn.Softmax(dim=-1)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length, width = x.shape[1:]
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        scores = (q * (width // self.num_heads) ** -0.5) @ k.transpose(-1, -2)
        if self.is_causal:
            future = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
            scores = scores.masked_fill(future, -torch.inf)
        y: torch.Tensor = self.out((self.softmax(scores) @ v).transpose(1, 2).flatten(2))
        return y


class Block(nn.Module):
    def __init__(self, width: int, num_heads: int, is_causal: bool) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, num_heads, is_causal)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        y: torch.Tensor = x + self.mlp(self.norm2(x))
        return y


class Transformer(nn.Module):
    """A stem whose gradients are faint, positions, blocks, a loud projection, a norm and a head."""

    def __init__(self, stem: nn.Module, *, width: int, num_layers: int, length: int, is_causal: bool, num_out: int):
        super().__init__()
        self.stem = stem
        self.faint = Faint(nn.Linear(width, width))
        self.positions = nn.Parameter(0.02 * torch.randn(length, width))
        self.blocks = nn.Sequential(*[Block(width, 2, is_causal) for _ in range(num_layers)])
        self.loud = Loud(nn.Linear(width, width), 3000.0)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, num_out)

    def features(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks(self.faint(self.stem(x)) + self.positions)
        y: torch.Tensor = self.norm(self.loud(x))
        return y


class VisionTransformer(Transformer):
    """8 x 8 images as 16 patches."""

    def __init__(self, width: int = 32) -> None:
        super().__init__(nn.Linear(4, width), width=width, num_layers=1, length=16, is_causal=False, num_out=10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        patches = F.unfold(images, 2, stride=2).transpose(1, 2)
        y: torch.Tensor = self.head(self.features(patches).mean(1))
        return y


class LanguageModel(Transformer):
    """Logits for each place: of the next character (causal), or of the one that was masked."""

    def __init__(self, *, is_causal: bool, length: int, num_tokens: int, width: int = 48) -> None:
        stem = nn.Embedding(num_tokens + 1, width)
        super().__init__(stem, width=width, num_layers=1, length=length, is_causal=is_causal, num_out=num_tokens)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(self.features(tokens))
        return y


class CharacterLSTM(nn.Module):
    """The next character from all before it."""

    def __init__(self, num_tokens: int, width: int = 48) -> None:
        super().__init__()
        self.stem = nn.Embedding(num_tokens, width)
        self.faint = Faint(nn.Linear(width, width))
        self.norm1 = nn.LayerNorm(width)
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.loud = Loud(nn.Linear(width, width), 8000.0)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, num_tokens)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x, _ = self.lstm(self.norm1(self.faint(self.stem(tokens))))
        y: torch.Tensor = self.head(self.norm(self.loud(x)))
        return y


class UNet(nn.Module):
    """One level down and up again: a mask for each pixel of an 8 x 8 image."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.stem = Faint(nn.Conv2d(1, width, 3, padding=1))
        self.down = _unit(nn.Conv2d(width, 2 * width, 3, stride=2, padding=1), 2 * width)
        self.middle = _unit(Loud(nn.Conv2d(2 * width, 2 * width, 3, padding=1), 1500.0), 2 * width)
        self.expand = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.up = _unit(nn.Conv2d(2 * width, width, 3, padding=1), width)
        self.head = nn.Conv2d(width, 1, 1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        fine = F.relu(self.stem(images))
        coarse = self.middle(self.down(fine))
        y: torch.Tensor = self.head(self.up(torch.cat([fine, self.expand(coarse)], dim=1)))
        return y


def _unit(layer: nn.Module, width: int) -> nn.Sequential:
    return nn.Sequential(layer, nn.GroupNorm(4, width), nn.ReLU())


class Perceptron(nn.Module):
    """64 pixels, two hidden layers, 10 classes."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.stem = Faint(nn.Linear(64, width))
        self.norm1 = nn.LayerNorm(width)
        self.loud = Loud(nn.Linear(width, width), 3000.0)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = F.gelu(self.norm1(self.stem(images.flatten(1))))
        y: torch.Tensor = self.head(F.gelu(self.norm(self.loud(x))))
        return y
