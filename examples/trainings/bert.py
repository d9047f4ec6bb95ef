"""A BERT-like encoder that tells which topic of CPython's documentation a passage comes from.

autoprec search --task examples/trainings/bert.py:task
"""

import torch
import torch.nn.functional as F
from torch import nn

import autoprec
from autoprec.tasks.text import NUM_BYTES, PADDING, topic_batches


class Classifier(nn.Module):
    def __init__(self, width: int, num_layers: int, max_length: int, num_topics: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(NUM_BYTES + 1, width, padding_idx=PADDING)
        self.positions = nn.Embedding(max_length, width)
        self.norm = nn.LayerNorm(width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, activation="gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, num_layers)
        self.head = nn.Linear(width, num_topics)

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.norm(self.tokens(tokens) + self.positions(positions))
        x = self.encoder(x, src_key_padding_mask=~mask)
        weights = mask[..., None].to(x.dtype)
        return self.head((x * weights).sum(1) / weights.sum(1))


def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(batch["tokens"], mask=batch["mask"]), batch["labels"])


def accuracy(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return (model(batch["tokens"], mask=batch["mask"]).argmax(1) == batch["labels"]).float().mean()


def task(
    data: str = "topics",
    width: int = 64,
    num_layers: int = 2,
    max_length: int = 128,
    num_topics: int = 8,
    batch_size: int = 32,
    lr: float = 1e-3,
) -> autoprec.Task:
    train, held_out = topic_batches(data, num_topics=num_topics, max_length=max_length, batch_size=batch_size)
    return autoprec.Task(
        name="bert",
        model=lambda: Classifier(width, num_layers, max_length, num_topics),
        train_batches=train,
        eval_batches=held_out,
        loss=loss,
        metric=accuracy,
        optimizer_settings={"lr": lr, "weight_decay": 0.01},
        max_grad_norm=1.0,
    )
