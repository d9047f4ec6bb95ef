"""Windows of tokens for language models: the next token, or the masked ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from autoprec.tasks.epochs import HELD_OUT_SHARE, EpochBatches, check_batch_size

__all__ = ["LanguageBatch", "UNMASKED", "masked_batches", "next_token_batches", "split_document"]

MASKED_SHARE = 0.15
"""Share of tokens to be found again (Devlin et al., "BERT", section 3.1)."""
UNMASKED = -100
"""Target of a token that was not masked: what `cross_entropy` ignores."""
LanguageBatch = tuple[torch.Tensor, torch.Tensor]
Content = TypeVar("Content", bytes, torch.Tensor)


def next_token_batches(
    documents: Sequence[torch.Tensor], *, data: str, length: int, batch_size: int
) -> tuple[EpochBatches, EpochBatches]:
    """Return training and held-out batches of (inputs, targets), both (n, length) int64; targets are one token later.

    The last fifth of each document, a 1-D integer tensor, is held out. Training windows start at every half length.

    Raises:
        UsageError, TaskError: a batch size that the text cannot fill; `data` names the text.
    """
    splits = _splits(documents, length + 1, overlap=1, data=data, batch_size=batch_size)
    return _batches([_NextToken(windows) for windows in splits], splits, batch_size)


def masked_batches(
    documents: Sequence[torch.Tensor], *, data: str, length: int, batch_size: int, mask_token: int, seed: int = 0
) -> tuple[EpochBatches, EpochBatches]:
    """Return training and held-out batches of (inputs, targets), both (n, length) int64.

    Of each window 15 % of the tokens, the same ones in each epoch, are `mask_token` in the inputs; the targets have
    them and `UNMASKED` everywhere else.

    Raises:
        UsageError, TaskError: as `next_token_batches`.
    """
    splits = _splits(documents, length, overlap=0, data=data, batch_size=batch_size)
    generator = torch.Generator().manual_seed(seed)
    masks = [torch.rand(windows.shape, generator=generator) < MASKED_SHARE for windows in splits]
    for mask in masks:
        mask[:, 0] |= ~mask.any(dim=1)  # a window without a masked token has no loss
    return _batches(
        [_MaskedTokens(windows, mask, mask_token) for windows, mask in zip(splits, masks, strict=True)],
        splits,
        batch_size,
    )


def split_document(content: Content) -> tuple[Content, Content]:
    """Return what comes before the last fifth of a document, and the last fifth."""
    border = round(len(content) * (1 - HELD_OUT_SHARE))
    return content[:border], content[border:]


def _splits(
    documents: Sequence[torch.Tensor], width: int, *, overlap: int, data: str, batch_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return training and held-out windows of `width` tokens; held-out ones share `overlap` tokens, no more."""
    parts = [split_document(document) for document in documents]
    length = width - overlap
    train = _windows([kept for kept, _ in parts], width, stride=max(1, length // 2))
    held_out = _windows([left for _, left in parts], width, stride=length)
    check_batch_size(batch_size, data=data, num_train=len(train), num_held_out=len(held_out))
    return train, held_out


def _windows(parts: Sequence[torch.Tensor], width: int, *, stride: int) -> torch.Tensor:
    found = [part.unfold(0, width, stride) for part in parts if len(part) >= width]
    return torch.cat(found) if found else torch.empty(0, width, dtype=torch.uint8)


def _batches(
    collate: Sequence[_NextToken | _MaskedTokens], splits: Sequence[torch.Tensor], batch_size: int
) -> tuple[EpochBatches, EpochBatches]:
    return (
        EpochBatches(collate[0], len(splits[0]), batch_size, shuffle=True),
        EpochBatches(collate[1], len(splits[1]), batch_size, shuffle=False),
    )


@dataclass(frozen=True, slots=True, eq=False)
class _NextToken:
    windows: torch.Tensor

    def __call__(self, indices: torch.Tensor) -> LanguageBatch:
        picked = self.windows[indices].long()
        return picked[:, :-1].contiguous(), picked[:, 1:].contiguous()  # losses look at them with `view(-1)`


@dataclass(frozen=True, slots=True, eq=False)
class _MaskedTokens:
    windows: torch.Tensor
    masks: torch.Tensor
    mask_token: int

    def __call__(self, indices: torch.Tensor) -> LanguageBatch:
        tokens, mask = self.windows[indices].long(), self.masks[indices]
        return tokens.masked_fill(mask, self.mask_token), tokens.masked_fill(~mask, UNMASKED)
