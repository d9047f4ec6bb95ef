"""A bidirectional LSTM on speech of variable length: which of nine speakers says /ae/. Needs `autoprec[speech]`.

autoprec search --task examples/trainings/lstm.py:task
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

import autoprec
from autoprec.tasks.speech import NUM_FEATURES, NUM_SPEAKERS, speech_batches


class Speakers(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(NUM_FEATURES, width, batch_first=True, bidirectional=True)
        self.head = nn.Sequential(nn.Linear(2 * width, width), nn.ReLU(), nn.Linear(width, NUM_SPEAKERS))

    def forward(self, frames: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = pack_padded_sequence(frames, lengths.cpu(), batch_first=True, enforce_sorted=False)
        _, (last, _) = self.lstm(packed)
        return self.head(torch.cat([last[0], last[1]], dim=1))


def loss(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    frames, lengths, speakers = batch
    return F.cross_entropy(model(frames, lengths), speakers)


def accuracy(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    frames, lengths, speakers = batch
    return (model(frames, lengths).argmax(1) == speakers).float().mean()


def task(width: int = 64, batch_size: int = 18) -> autoprec.Task:
    train, held_out = speech_batches("japanese_vowels", batch_size=batch_size)
    return autoprec.Task(
        name="lstm",
        model=lambda: Speakers(width),
        train_batches=train,
        eval_batches=held_out,
        loss=loss,
        metric=accuracy,
        optimizer_settings={"lr": 5e-3},
        max_grad_norm=1.0,
    )
