"""BERT-large for pretraining as plain modules, its attention written out or fused, and batches of it."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F


class BertLayer(nn.Module):
    """A post-norm encoder layer, its attention written out operator by operator or fused."""

    def __init__(self, width: int, num_heads: int, *, fused_attention: bool) -> None:
        super().__init__()
        self.num_heads, self.fused_attention = num_heads, fused_attention
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.output, self.attention_norm = nn.Linear(width, width), nn.LayerNorm(width)
        self.up, self.down, self.norm = nn.Linear(width, 4 * width), nn.Linear(4 * width, width), nn.LayerNorm(width)
        self.probability_dropout, self.attention_dropout, self.dropout = (nn.Dropout(0.1) for _ in range(3))
        self.softmax, self.gelu = nn.Softmax(dim=-1), nn.GELU()

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            part(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        if self.fused_attention:
            context = F.scaled_dot_product_attention(query, key, value, mask, dropout_p=0.1)
        else:
            scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1]) + mask
            context = self.probability_dropout(self.softmax(scores)) @ value
        context = context.transpose(1, 2).flatten(2)
        x = self.attention_norm(x + self.attention_dropout(self.output(context)))
        return self.norm(x + self.dropout(self.down(self.gelu(self.up(x)))))


class BertLarge(nn.Module):
    """BERT-large for pretraining: 24 layers, width 1024, 16 heads; the word head sees the masked places alone."""

    def __init__(self, *, fused_attention: bool, vocabulary: int = 30528, width: int = 1024) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(vocabulary, width), nn.Embedding(512, width)
        self.norm, self.dropout = nn.LayerNorm(width), nn.Dropout(0.1)
        self.layers = nn.ModuleList(BertLayer(width, 16, fused_attention=fused_attention) for _ in range(24))
        self.transform, self.transform_norm = nn.Linear(width, width), nn.LayerNorm(width)
        self.gelu, self.head = nn.GELU(), nn.Linear(width, vocabulary)
        self.head.weight = self.words.weight

    def forward(self, ids: torch.Tensor, mask: torch.Tensor, num_masked: int) -> torch.Tensor:
        x = self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        x = self.dropout(self.norm(x))
        for layer in self.layers:
            x = layer(x, mask)
        masked = self.transform_norm(self.gelu(self.transform(x[:, :num_masked])))
        logits: torch.Tensor = self.head(masked)
        return logits


def bert_loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> torch.Tensor:
    ids, mask, words = batch
    return F.cross_entropy(model(ids, mask, words.shape[1]).flatten(0, 1), words.flatten())


def bert_batch(batch_size: int, length: int, num_masked: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    ids = torch.zeros(batch_size, length, dtype=torch.long)
    return ids, torch.zeros(batch_size, 1, 1, length), torch.zeros(batch_size, num_masked, dtype=torch.long)
