"""Speech features of variable length: which of nine speakers says /ae/ (Japanese Vowels, through aeon)."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch.nn.utils.rnn import pad_sequence

from autoprec.errors import TaskError, UsageError, did_you_mean
from autoprec.tasks.epochs import EpochBatches, check_batch_size

__all__ = ["NUM_FEATURES", "NUM_SPEAKERS", "speech_batches"]

NUM_FEATURES, NUM_SPEAKERS = 12, 9
"""LPC cepstrum coefficients of a frame; speakers (Kudo, Toyama and Shimbo, "Multidimensional curve classification
using passing-through regions", 1999)."""
SPEECH_NAMES = ("japanese_vowels",)

SpeechBatch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def speech_batches(data: str = "japanese_vowels", *, batch_size: int = 16) -> tuple[EpochBatches, EpochBatches]:
    """Return training and held-out batches: the data's own 270 and 370 utterances.

    A batch is (features, lengths, labels): (n, longest, 12) float32 with zeros behind shorter utterances, (n,) int64 of
    7 to 29 frames, (n,) int64 speakers from 0. Features have the training split's mean 0 and variance 1.

    Raises:
        UsageError: an unknown name. TaskError: aeon is not installed (the extra `speech`).
    """
    if data not in SPEECH_NAMES:
        raise UsageError(f"data {data!r}; allowed: {', '.join(SPEECH_NAMES)}{did_you_mean(data, SPEECH_NAMES)}")
    train, held_out = _load()
    check_batch_size(batch_size, data=data, num_train=len(train.labels), num_held_out=len(held_out.labels))
    return (
        EpochBatches(train, len(train.labels), batch_size, shuffle=True),
        EpochBatches(held_out, len(held_out.labels), batch_size, shuffle=False),
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Utterances:
    features: tuple[torch.Tensor, ...]
    labels: torch.Tensor

    def __call__(self, indices: torch.Tensor) -> SpeechBatch:
        picked = [self.features[index] for index in indices.tolist()]
        lengths = torch.tensor([len(frames) for frames in picked])
        return pad_sequence(picked, batch_first=True), lengths, self.labels[indices]


@lru_cache(maxsize=1)
def _load() -> tuple[_Utterances, _Utterances]:
    """Read both splits once; aeon and what it imports take seconds."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from aeon.datasets import load_japanese_vowels
    except ImportError:
        raise TaskError("data 'japanese_vowels' comes with aeon: pip install 'autoprec[speech]'") from None
    splits = [load_japanese_vowels(split=split) for split in ("train", "test")]
    features = [[torch.from_numpy(series.T).float() for series in found] for found, _ in splits]
    frames = torch.cat(features[0])
    mean, std = frames.mean(0), frames.std(0)
    train, held_out = (
        _Utterances(
            tuple((series - mean) / std for series in found), torch.tensor([int(label) - 1 for label in labels])
        )
        for found, (_, labels) in zip(features, splits, strict=True)
    )
    return train, held_out
