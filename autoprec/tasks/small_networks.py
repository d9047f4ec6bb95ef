"""Small networks for data that is no image: a byte-level transformer, recurrent and convolutional ones, an MLP."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

__all__ = ["ByteTransformer", "ConvolutionalClassifier", "RecurrentClassifier", "build_mlp"]


class ByteTransformer(nn.Module):
    """torch's own transformer layers, normalised before attention, over byte embeddings and learned positions.

    (n, length) tokens give (n, length, outputs) where `causal`, else (n, outputs) from the mean over unmasked places.
    """

    def __init__(
        self, *, num_tokens: int, num_outputs: int, max_length: int, causal: bool, width: int = 128, num_layers: int = 4
    ) -> None:
        super().__init__()
        self.causal = causal
        self.tokens = nn.Embedding(num_tokens, width)
        self.positions = nn.Embedding(max_length, width)
        layer = nn.TransformerEncoderLayer(
            width, 4, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, num_layers, norm=nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, num_outputs)

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """`mask` (n, length) bool is True where there is a byte."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self.tokens(tokens) + self.positions(places)
        if self.causal:
            future = torch.ones(len(places), len(places), dtype=torch.bool, device=tokens.device).triu(1)
            encoded = self.encoder(hidden, mask=future, is_causal=True)
            return self.head(encoded)  # type: ignore[no-any-return]
        encoded = self.encoder(hidden, src_key_padding_mask=None if mask is None else ~mask)
        weights = torch.ones_like(tokens) if mask is None else mask
        weights = weights[..., None].to(encoded.dtype)
        return self.head((encoded * weights).sum(1) / weights.sum(1))  # type: ignore[no-any-return]


class RecurrentClassifier(nn.Module):
    """A bidirectional LSTM or GRU over packed sequences; the last state of both directions is classified."""

    def __init__(self, kind: str, *, num_features: int, num_classes: int, width: int = 64) -> None:
        super().__init__()
        cell = {"lstm": nn.LSTM, "gru": nn.GRU}[kind]
        self.recurrent = cell(num_features, width, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * width, num_classes)

    def forward(self, frames: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = pack_padded_sequence(frames, lengths.cpu(), batch_first=True, enforce_sorted=False)
        _, state = self.recurrent(packed)
        last = state[0] if isinstance(state, tuple) else state
        return self.head(torch.cat([last[0], last[1]], dim=1))  # type: ignore[no-any-return]


class ConvolutionalClassifier(nn.Module):
    """1-D convolutions over time; the mean over the frames of each sequence is classified."""

    def __init__(self, *, num_features: int, num_classes: int, width: int = 64) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv1d(num_features, width, 5, padding=2),
            nn.GroupNorm(8, width),
            nn.ReLU(),
            nn.Conv1d(width, width, 5, padding=2),
            nn.GroupNorm(8, width),
            nn.ReLU(),
        )
        self.head = nn.Linear(width, num_classes)

    def forward(self, frames: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        hidden = self.convolutions(frames.transpose(1, 2))
        inside = torch.arange(hidden.shape[2], device=hidden.device) < lengths[:, None]
        total = (hidden * inside[:, None].to(hidden.dtype)).sum(2)
        return self.head(total / lengths[:, None].to(hidden.dtype))  # type: ignore[no-any-return]


def build_mlp(*, num_features: int, num_classes: int, width: int = 64) -> nn.Module:
    """Build three linear layers with BatchNorm and ReLU between them."""
    return nn.Sequential(
        nn.Linear(num_features, width),
        nn.BatchNorm1d(width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.BatchNorm1d(width),
        nn.ReLU(),
        nn.Linear(width, num_classes),
    )
