"""Seven real trainings on digits and text that come with packages; each learns within 1,200 steps on one thread."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

from autoprec.tasks import Task
from autoprec.tasks.text import load_text
from horizon_parts.networks import CharacterLSTM, ConvNet, LanguageModel, Perceptron, UNet, VisionTransformer

__all__ = ["TASKS"]

BATCH = 32
PASSAGES = 16
"""In a batch of text."""
LENGTH = 16
"""Characters of a passage; the LSTM reads a quarter, since each costs it a step of its own."""
NUM_HELD_OUT = 256
NUM_TOKENS = 96
"""Printable ASCII and one for all else."""
MASKED = NUM_TOKENS
"""What a masked character is replaced with."""
MASK_SHARE = 0.2


@functools.cache
def digits() -> tuple[torch.Tensor, torch.Tensor]:
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32)[:, None] / 16
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    return images[order], torch.tensor(data.target)[order]


@functools.cache
def characters() -> tuple[torch.Tensor, torch.Tensor]:
    """Return training and held-out characters, as numbers: the last fifth of each document is held out."""
    documents = [tokens.long() for tokens in load_text("topics").tokens()]
    coded = [torch.where((d >= 32) & (d < 127), d - 32, NUM_TOKENS - 1) for d in documents]
    cuts = [len(d) * 4 // 5 for d in coded]
    return (
        torch.cat([d[:cut] for d, cut in zip(coded, cuts, strict=True)]),
        torch.cat([d[cut:] for d, cut in zip(coded, cuts, strict=True)]),
    )


def shuffled(*tensors: torch.Tensor) -> Callable[[], Iterator[Any]]:
    """Return batches in an order drawn anew each epoch."""

    def batches() -> Iterator[Any]:
        for indices in torch.randperm(len(tensors[0])).split(BATCH):
            if len(indices) == BATCH:
                yield tuple(tensor[indices] for tensor in tensors)

    return batches


def passages(text: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    return text[starts[:, None] + torch.arange(LENGTH + 1)]


def random_passages(make: Callable[[torch.Tensor], Any]) -> Callable[[], Iterator[Any]]:
    """Return endless batches from random places of the training text."""
    text = characters()[0]

    def batches() -> Iterator[Any]:
        while True:
            yield make(passages(text, torch.randint(len(text) - LENGTH - 1, (PASSAGES,))))

    return batches


def held_out_passages(make: Callable[[torch.Tensor], Any]) -> list[Any]:
    text = characters()[1]
    starts = torch.linspace(0, len(text) - LENGTH - 2, NUM_HELD_OUT).long()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return [make(passages(text, starts))]


def next_character(windows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return windows[:, :-1], windows[:, 1:]


def next_of_quarter(windows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return next_character(windows[:, : LENGTH // 4 + 1])


def masked_characters(windows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Hide a share of the characters; the targets of all others are -100, which the loss leaves out."""
    targets = windows[:, :-1]
    hidden = torch.rand(targets.shape) < MASK_SHARE
    return targets.masked_fill(hidden, MASKED), targets.masked_fill(~hidden, -100)


def cross_entropy(model: nn.Module, batch: Any) -> torch.Tensor:
    logits = model(batch[0])
    return F.cross_entropy(logits.flatten(0, -2), batch[1].flatten())


def share_correct(model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss and the share of right answers, of one forward pass."""
    logits, targets = model(batch[0]), batch[1]
    counted = targets != -100
    right = (logits.argmax(-1) == targets)[counted].float().mean()
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten()), right


def stroke_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.binary_cross_entropy_with_logits(model(batch[0]), batch[1])


def stroke_overlap(model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss and the mean intersection over union of the images."""
    logits, strokes = model(batch[0]), batch[1] > 0.5
    both, either = ((logits > 0) & strokes).sum((1, 2, 3)), ((logits > 0) | strokes).sum((1, 2, 3))
    return F.binary_cross_entropy_with_logits(logits, batch[1]), (both / either.clamp(min=1)).mean()


def _task(name: str, model: Callable[[], nn.Module], train: Any, held_out: list[Any], **changes: Any) -> Task:
    settings = {
        "loss": cross_entropy,
        "evaluate": share_correct,
        "optimizer": torch.optim.AdamW,
        "optimizer_settings": {"lr": 3e-3},
        "optimizer_implementation": "fused",
    }
    return Task(name=name, model=model, train_batches=train, eval_batches=held_out, **{**settings, **changes})


def _image_task(name: str, model: Callable[[], nn.Module], **changes: Any) -> Task:
    images, labels = digits()
    train = shuffled(images[360:], labels[360:])
    return _task(name, model, train, [(images[:360], labels[:360])], **changes)


def _segmentation_task(name: str, model: Callable[[], nn.Module]) -> Task:
    images, _ = digits()
    strokes = (images > 0.5).float()
    noisy = images + 0.5 * torch.randn(images.shape, generator=torch.Generator().manual_seed(0))
    return _task(
        name,
        model,
        shuffled(noisy[360:], strokes[360:]),
        [(noisy[:360], strokes[:360])],
        loss=stroke_loss,
        evaluate=stroke_overlap,
        metric_name="intersection over union",
    )


def _text_task(name: str, model: Callable[[], nn.Module], make: Callable[[torch.Tensor], Any]) -> Task:
    return _task(name, model, random_passages(make), held_out_passages(make))


TASKS: dict[str, Callable[[], Task]] = {
    "cnn": lambda: _image_task("cnn", ConvNet),
    "vit": lambda: _image_task("vit", VisionTransformer),
    "mlp": lambda: _image_task("mlp", Perceptron, optimizer_settings={"lr": 1e-3}),
    "unet": lambda: _segmentation_task("unet", UNet),
    "causal": lambda: _text_task(
        "causal", lambda: LanguageModel(is_causal=True, length=LENGTH, num_tokens=NUM_TOKENS), next_character
    ),
    "masked": lambda: _text_task(
        "masked", lambda: LanguageModel(is_causal=False, length=LENGTH, num_tokens=NUM_TOKENS), masked_characters
    ),
    "lstm": lambda: _text_task("lstm", lambda: CharacterLSTM(NUM_TOKENS), next_of_quarter),
}
