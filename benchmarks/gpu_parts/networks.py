"""The three networks of the benchmark, each with its batch and its loss: ResNet-50, ViT-B/16 and one like BERT-base."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import torchvision
from torch import nn

from autoprec import Policy

__all__ = ["NETWORKS", "Network"]

NUM_TOKENS = 30_522
"""BERT's vocabulary."""
SHARE_MASKED = 0.15


class BertLike(nn.Module):
    """torch's own encoder layers in BERT-base's sizes, with a head over the vocabulary at the masked places."""

    def __init__(self, *, num_layers: int = 12, width: int = 768, num_heads: int = 12, max_length: int = 512) -> None:
        super().__init__()
        self.tokens = nn.Embedding(NUM_TOKENS, width)
        self.positions = nn.Embedding(max_length, width)
        self.norm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(0.1)
        layer = nn.TransformerEncoderLayer(width, num_heads, 4 * width, 0.1, F.gelu, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, num_layers, enable_nested_tensor=False)
        self.transform = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width))
        self.head = nn.Linear(width, NUM_TOKENS)

    def forward(self, tokens: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """(n, length) tokens and the (n, masked) places to predict give (n, masked, vocabulary) logits."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self.encoder(self.dropout(self.norm(self.tokens(tokens) + self.positions(positions))))
        masked = hidden.gather(1, places[..., None].expand(-1, -1, hidden.shape[-1]))
        return self.head(self.transform(masked))


@dataclass(frozen=True)
class Network:
    """`build(quick)` a model, `batch(quick)` on the CPU, `loss(model, batch)`; `policy` where a search gave none."""

    build: Callable[[bool], nn.Module]
    batch: Callable[[bool], tuple[torch.Tensor, ...]]
    loss: Callable[[nn.Module, Any], torch.Tensor]
    policy: Policy
    shape: Callable[[bool], str]


def _image_shape(quick: bool, batch_size: int) -> tuple[int, int]:
    return (2, 64) if quick else (batch_size, 224)


def _images(batch_size: int) -> Callable[[bool], tuple[torch.Tensor, ...]]:
    def batch(quick: bool) -> tuple[torch.Tensor, ...]:
        num, size = _image_shape(quick, batch_size)
        generator = torch.Generator().manual_seed(0)
        images = torch.randn(num, 3, size, size, generator=generator).contiguous(memory_format=torch.channels_last)
        return images, torch.randint(1000, (num,), generator=generator)

    return batch


def _tokens(quick: bool) -> tuple[torch.Tensor, ...]:
    num, length = (2, 32) if quick else (64, 128)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(NUM_TOKENS, (num, length), generator=generator)
    num_masked = round(SHARE_MASKED * length)
    places = torch.stack([torch.randperm(length, generator=generator)[:num_masked] for _ in range(num)])
    return tokens, places, tokens.gather(1, places)


def _classify(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def _predict(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0], batch[1]).flatten(0, 1), batch[2].flatten())


def _vision(name: str, batch_size: int, policy: Policy) -> Network:
    def build(quick: bool) -> nn.Module:
        size = _image_shape(quick, batch_size)[1]
        if quick and name.startswith("vit"):
            return torchvision.models.VisionTransformer(size, 16, 2, 2, 64, 128)
        return torchvision.models.get_model(name, num_classes=1000)

    def shape(quick: bool) -> str:
        num, size = _image_shape(quick, batch_size)
        return f"{num} x 3 x {size} x {size}"

    return Network(build, _images(batch_size), _classify, policy, shape)


NETWORKS: Mapping[str, Network] = {
    "resnet50": _vision("resnet50", 128, Policy(default="fp16", modules={"fc": "fp32"})),
    "vit_b_16": _vision("vit_b_16", 64, Policy(default="autocast", modules={"encoder": "fp16"})),
    "bert_base": Network(
        lambda quick: BertLike(num_layers=2, width=64, num_heads=2) if quick else BertLike(),
        _tokens,
        _predict,
        Policy(default="autocast", modules={"norm": "fp16", "dropout": "fp16", "encoder": "fp16"}),
        lambda quick: "2 x 32 tokens" if quick else "64 x 128 tokens",
    ),
}
