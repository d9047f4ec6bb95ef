from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import nn

from autoprec.estimates import StepSettings, UnaffordableError, estimate_step, real_peak
from autoprec.estimates.batches import resize_batch


class Pair(NamedTuple):
    images: torch.Tensor
    labels: torch.Tensor


def test_resizing_repeats_samples_and_pixels_and_leaves_other_tensors() -> None:
    batch = Pair(torch.arange(2 * 3 * 4 * 4.0).reshape(2, 3, 4, 4), torch.tensor([7, 8]))
    weights = torch.ones(3)
    resized, same = resize_batch((batch, weights), batch_size=5, image_size=6)
    assert resized.images.shape == (5, 3, 6, 6)
    assert resized.labels.tolist() == [7, 8, 7, 8, 7]
    assert same is weights
    assert torch.equal(resized.images[2, :, :4, :4], batch.images[0])


def test_resizing_keeps_channels_last() -> None:
    images = torch.zeros(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    resized = resize_batch(images, batch_size=4, image_size=8)
    assert resized.is_contiguous(memory_format=torch.channels_last)
    assert not resized.is_contiguous()


def test_no_other_size_gives_the_batch_itself() -> None:
    batch = (torch.zeros(2, 3),)
    assert resize_batch(batch) is batch


class Masked(nn.Module):
    """An encoder that is given a causal mask, whose values torch's own layers look at."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 1), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(x, mask=nn.Transformer.generate_square_subsequent_mask(x.shape[1])))


class LooksAtValues(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x if x.sum() > -1e30 else -x)


class Closed(nn.Module):
    """A function in an attribute that closes over layers, and one over a list of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(16, 32), nn.Linear(32, 8)])
        up, parts = self.layers[0], list(self.layers)
        self.feed = lambda x: parts[1](torch.relu(up(x)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.feed(x)


def summed(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().sum()


@pytest.mark.parametrize("batch_size", [2, 256])
def test_a_causal_mask_is_computed_at_the_batch_asked_for(batch_size: int) -> None:
    model, settings = Masked(), StepSettings(batch_size=batch_size, as_on_cuda=False)
    estimate = estimate_step(
        model, torch.zeros(2, 12, 16), summed, batch_size=batch_size, as_on_cuda=False, rounding_bytes=1
    )
    real = real_peak(model, torch.zeros(2, 12, 16), summed, settings=settings)
    assert (estimate.peak_memory_bytes.kind, estimate.num_samples) == ("computed", batch_size)
    assert estimate.peak_memory_bytes.value == pytest.approx(real.peak_bytes, rel=0.01)


def test_a_step_that_must_run_runs_at_the_batch_asked_for() -> None:
    few, many = (estimate_step(LooksAtValues(), torch.zeros(2, 16), summed, batch_size=size) for size in (2, 50_000))
    assert (many.num_samples, many.peak_memory_bytes.kind) == (50_000, "measured")
    assert many.by_category["inputs"] == 50_000 * 16 * 4
    assert few.by_category["inputs"] == 512


def test_a_step_that_must_run_and_takes_too_much_is_refused() -> None:
    with pytest.raises(UnaffordableError, match=r"batch_size: found 1,000,000,000; .* GiB here; allowed: up to [\d,]+"):
        estimate_step(LooksAtValues(), torch.zeros(2, 16), summed, batch_size=10**9)


def test_a_lambda_over_layers_calls_the_copies() -> None:
    model = Closed()
    estimate = estimate_step(model, torch.zeros(4, 16), summed, as_on_cuda=False, rounding_bytes=1)
    real = real_peak(model, torch.zeros(4, 16), summed, settings=StepSettings(as_on_cuda=False))
    parameters = 4 * (16 * 32 + 32 + 32 * 8 + 8)
    assert estimate.peak_memory_bytes.kind == "computed"
    assert estimate.by_category["parameters"] == estimate.by_category["gradients"] == parameters
    assert estimate.peak_memory_bytes.value == real.peak_bytes
    assert all(parameter.grad is None for parameter in model.parameters())
