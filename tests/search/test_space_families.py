"""Which search space a model gets, and what each space makes of a model of its family."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torchvision
from torch import nn

from autoprec.search.families import family_of
from autoprec.tasks.small_networks import ByteTransformer, ConvolutionalClassifier, RecurrentClassifier, build_mlp


def unet() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.ConvTranspose2d(4, 1, 2))


class BertEncoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 8)
        self.attention = nn.MultiheadAttention(8, 2)


class GPTBlock(BertEncoder):
    pass


MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "resnet18": (lambda: torchvision.models.resnet18(weights=None), "resnet"),
    "squeezenet": (lambda: torchvision.models.squeezenet1_1(weights=None), "cnn"),
    "vit": (lambda: torchvision.models.VisionTransformer(32, 16, 1, 2, 32, 64), "vit"),
    "unet": (unet, "unet"),
    "bert": (BertEncoder, "bert"),
    "gpt": (GPTBlock, "gpt"),
    "bytes": (
        lambda: ByteTransformer(num_tokens=8, num_outputs=8, max_length=8, causal=True, width=8, num_layers=1),
        "transformer",
    ),
    "lstm": (lambda: RecurrentClassifier("lstm", num_features=2, num_classes=2), "rnn"),
    "conv1d": (lambda: ConvolutionalClassifier(num_features=2, num_classes=2), "cnn"),
    "conv1d, gru": (lambda: nn.Sequential(nn.Conv1d(2, 2, 3), nn.GRU(2, 2)), "speech"),
    "wav": (lambda: nn.Sequential(nn.Conv1d(2, 8, 3), nn.MultiheadAttention(8, 2)), "speech"),
    "mlp": (lambda: build_mlp(num_features=4, num_classes=2), "mlp"),
    "embedding": (lambda: nn.Sequential(nn.Embedding(4, 4)), "default"),
}


@pytest.mark.parametrize(("build", "family"), MODELS.values(), ids=MODELS.keys())
def test_the_space_is_chosen_by_what_the_model_is_made_of(build: Callable[[], nn.Module], family: str) -> None:
    assert family_of(build()) == family
