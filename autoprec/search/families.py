"""Which of the search spaces that come along fits a model: chosen by what the model is made of."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autoprec.search.space import SearchSpace, load_space

if TYPE_CHECKING:
    from torch import nn

__all__ = ["choose_space", "family_of"]

RECURRENT = ("LSTM", "GRU", "RNN", "LSTMCell", "GRUCell", "RNNCell")
RESIDUAL = ("BasicBlock", "Bottleneck")
"""What torchvision, timm and most code after them call the blocks of a ResNet."""
UPSAMPLING = ("Upsample", "PixelShuffle", "ConvTranspose2d", "ConvTranspose3d")
PLAIN = ("Linear", "Bilinear")


def choose_space(model: nn.Module) -> SearchSpace:
    """Return the search space of the model's family."""
    return load_space(family_of(model))


def family_of(model: nn.Module) -> str:
    """Return the name of the search space that fits the classes of a model's modules, `default` where none does."""
    names = [type(module).__name__ for module in model.modules()]
    count = {name: names.count(name) for name in set(names)}
    convolutions = sum(n for name, n in count.items() if name.startswith(("Conv1d", "Conv2d", "Conv3d")))
    norms = count.get("LayerNorm", 0) + count.get("RMSNorm", 0)
    over_time = "Conv1d" in count
    if convolutions > norms and any(name in count for name in UPSAMPLING):
        return "unet"
    if any(name in count for name in RECURRENT):
        return "speech" if over_time else "rnn"
    if any("Attention" in name or "Attn" in name for name in count) or norms > convolutions:
        return _transformer(count, over_time=over_time)
    if convolutions:
        return "resnet" if any(name in count for name in RESIDUAL) else "cnn"
    return "mlp" if sum(count.get(name, 0) for name in PLAIN) > 1 else "default"


def _transformer(count: dict[str, int], *, over_time: bool) -> str:
    if over_time:
        return "speech"
    if "Conv2d" in count:
        return "vit"
    for family in ("bert", "gpt"):
        if any(family in name.lower() for name in count):
            return family
    return "transformer"
