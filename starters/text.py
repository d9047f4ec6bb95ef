"""A task for `autoprec search`: train a small byte-level language model on the documentation that comes with Python.

    autoprec search --task text.py:task --n-trials 4

Each part below is an example: put your own model, data and loss in its place.
"""

import pydoc_data.topics

import torch
import torch.nn.functional as F
from torch import nn

import autoprec

CONTEXT = 64
BATCH_SIZE = 16


class ByteModel(nn.Module):
    """A causal transformer over bytes, (n, t) token ids to (n, t, 256) logits."""

    def __init__(self, width=64, num_layers=2, num_heads=4):
        super().__init__()
        self.tokens = nn.Embedding(256, width)
        self.positions = nn.Embedding(CONTEXT, width)
        layer = nn.TransformerEncoderLayer(width, num_heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, num_layers, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256)

    def forward(self, ids):
        length = ids.shape[1]
        hidden = self.tokens(ids) + self.positions(torch.arange(length, device=ids.device))
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=ids.device)
        return self.head(self.norm(self.blocks(hidden, mask=mask, is_causal=True)))


def load_text():
    """Return the text as one tensor of bytes."""
    text = "\n".join(pydoc_data.topics.topics.values())
    return torch.tensor(list(text.encode()[:200_000]))


def loss(model, ids):
    """Return the cross entropy of the next byte. No autocast here: the policy decides the precision."""
    logits = model(ids[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def share_of_bytes_right(model, ids):
    """Return how many of the next bytes are predicted right. Larger is better."""
    return (model(ids[:, :-1]).argmax(-1) == ids[:, 1:]).float().mean()


def task():
    """Return the whole training; this is the function that --task names."""
    windows = load_text()
    windows = windows[: len(windows) // (CONTEXT + 1) * (CONTEXT + 1)].view(-1, CONTEXT + 1)
    train, held_out = windows[:-128], windows[-128:]

    def train_batches():
        """Yield one epoch. Whatever is random in it comes from torch's global random state."""
        for indices in torch.randperm(len(train)).split(BATCH_SIZE):
            yield train[indices]

    return autoprec.Task(
        name="bytes-transformer",
        model=ByteModel,
        train_batches=train_batches,  # or a list of batches, or a DataLoader
        eval_batches=list(held_out.split(64)),
        loss=loss,
        metric=share_of_bytes_right,
        metric_name="share of bytes right",
        optimizer=torch.optim.AdamW,
        optimizer_settings={"lr": 1e-3},
        max_grad_norm=1.0,
        num_tokens=lambda ids: ids.shape[0] * (ids.shape[1] - 1),  # throughput is then shown in tokens, too
        # accumulation_steps=4,    # batches to one optimizer step
        # settings={"data": "topics, version 1"},  # what else decides the numbers: other settings are another study
    )
