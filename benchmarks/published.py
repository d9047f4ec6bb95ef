"""Published training throughput (data/published.csv) beside what the roofline says of the same steps.

`read_figures()` -> the rows; `record(workload)` -> one recorded step; `comparisons()` -> predicted and published
ratios. Each row is one figure: samples a second of one GPU. Rows of one `run` differ in precision (FP32 or TF32 against
mixed or half) or in memory format alone, and give a ratio. The models were dealt to a tuning and a testing half in the
order of their names, before any share was fitted; no model is in both.
"""

from __future__ import annotations

import csv
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torchvision
from bert import BertLarge, bert_batch, bert_loss
from torch import nn
from torch.nn import functional as F

from autoprec.estimates import Roofline, StepRecording, StepSettings, gpu_by_name, predict_time, record_step
from autoprec.policy import Policy

PATH = Path(__file__).parent / "data" / "published.csv"
USUAL_BATCH = 128
"""Where a source does not say its batch."""
NOT_REBUILT = {"ssd300_resnet50", "nnunet_2d", "nnunet_3d", "jasper", "quartznet", "ncf", "mixer_b16_224"}
NOT_REBUILT |= {"poolformer_s24", "convmixer_768_32", "bert_large_squad", "efficientnet_b4"}
"""Rows whose model, or whose shape, is not in torchvision or in this folder."""


@dataclass(frozen=True, slots=True, order=True)
class Workload:
    """What is recorded once and priced on each GPU."""

    model: str
    batch_size: int
    memory_format: str
    precision: str
    accumulation_steps: int = 1


@dataclass(frozen=True, slots=True)
class Figure:
    run: int
    half: str
    gpu: str
    workload: Workload
    samples_per_second: float
    source: str

    @property
    def can_be_built(self) -> bool:
        return self.workload.model not in NOT_REBUILT


@dataclass(frozen=True, slots=True)
class Comparison:
    """One run: ratio of its second figure to its first, and both absolute figures, predicted and published."""

    half: str
    gpu: str
    models: tuple[Workload, Workload]
    source: str
    predicted: tuple[float, float]
    published: tuple[float, float]

    @property
    def predicted_ratio(self) -> float:
        return self.predicted[1] / self.predicted[0]

    @property
    def published_ratio(self) -> float:
        return self.published[1] / self.published[0]


def read_figures() -> list[Figure]:
    with PATH.open(newline="") as file:
        return [_figure(row) for row in csv.DictReader(file)]


def _figure(row: dict[str, str]) -> Figure:
    steps = {"bert_large_128": 64, "bert_large_512": 64}.get(row["model"], 1)
    workload = Workload(
        model=row["model"],
        batch_size=int(row["batch_size"] or USUAL_BATCH),
        memory_format=row["memory_format"] or "contiguous",
        precision=row["precision"],
        accumulation_steps=steps // (2 if row["precision"] == "amp" and steps > 1 else 1),
    )
    speed = float(row["samples_per_second"])
    return Figure(int(row["run"]), row["half"], row["gpu"], workload, speed, row["source"])


def comparisons(
    *, roofline: Roofline | None = None, recorded: Callable[[Workload], StepRecording] | None = None
) -> Iterator[Comparison]:
    """Yield a comparison for each run that can be rebuilt; each workload is recorded once."""
    recorded = recorded or functools.cache(record)
    for _, pair in itertools.groupby(read_figures(), key=lambda figure: figure.run):
        first, second = pair
        if not first.can_be_built:
            continue
        predicted = []
        for figure in (first, second):
            recording = recorded(figure.workload)
            seconds = predict_time(recording, gpu_by_name(figure.gpu), roofline=roofline).step_seconds
            predicted.append(recording.num_samples / seconds)
        yield Comparison(
            half=first.half,
            gpu=first.gpu,
            models=(first.workload, second.workload),
            source=first.source,
            predicted=(predicted[0], predicted[1]),
            published=(first.samples_per_second, second.samples_per_second),
        )


def record(workload: Workload) -> StepRecording:
    """Record the step of a row; "half" is a whole model in half that is not updated, as its source measures it."""
    policies = {"fp32": Policy(default="fp32"), "amp": Policy(default="autocast", dtype="fp16"), "half": None}
    settings = StepSettings(
        policy=policies[workload.precision],
        optimizer=torch.optim.SGD,
        optimizer_settings={"lr": 0.1, "momentum": 0.9},
        accumulation_steps=workload.accumulation_steps,
        batch_size=None if workload.model.startswith("bert") else workload.batch_size,
    )
    if workload.model.startswith("bert"):
        length = int(workload.model.rsplit("_", 1)[1])
        batch = bert_batch(workload.batch_size, length, {128: 20, 512: 80}[length])
        return record_step(BertLarge(fused_attention=False), batch, bert_loss, settings=settings)
    model, pixels = build(workload.model), torch.zeros(2, 3, 224, 224)
    if workload.memory_format == "channels_last":
        model = model.to(memory_format=torch.channels_last)
        pixels = pixels.contiguous(memory_format=torch.channels_last)
    if workload.precision == "half":
        model, pixels = model.half(), pixels.half()
    recording = record_step(model, (pixels, torch.zeros(2, dtype=torch.long)), image_loss, settings=settings)
    if workload.batch_size == 12:  # the source times forward and backward alone
        steps = tuple(operation for operation in recording.operations if operation.phase != "optimizer")
        return dataclasses.replace(recording, operations=steps)
    return recording


def image_loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    output = model(batch[0])
    heads = output if isinstance(output, tuple) else (output,)
    return torch.stack([F.cross_entropy(head, batch[1]) for head in heads]).sum()


class SqueezeBottleneck(torchvision.models.resnet.Bottleneck):
    """A bottleneck whose last normalised output is scaled by channel (Hu et al. 2018, reduction 16)."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        width = self.bn3.num_features
        scale = torchvision.ops.SqueezeExcitation(width, width // 16)
        self.bn3 = nn.Sequential(self.bn3, scale)  # type: ignore[assignment]


def build(name: str) -> nn.Module:
    resnet, blocks = torchvision.models.ResNet, torchvision.models.resnet
    if name in ("resnext101_32x4d", "seresnext101_32x4d"):
        block = SqueezeBottleneck if name.startswith("se") else blocks.Bottleneck
        return resnet(block, [3, 4, 23, 3], groups=32, width_per_group=4)
    if name == "vit_small_16":
        return torchvision.models.VisionTransformer(224, 16, 12, 6, 384, 1536)
    model: nn.Module = torchvision.models.get_model(name)
    return model
