"""A small single-shot detector: where on a canvas two handwritten digits lie, and which they are.

autoprec search --task examples/trainings/detector.py:task
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torchvision.ops import box_convert, box_iou

import autoprec

Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Images (n, 1, s, s); boxes (n, 2, 4) as left, top, right, bottom in pixels; digits (n, 2)."""

BACKGROUND = 10
STRIDE = 4


def make_batches(num_batches: int, batch_size: int, image_size: int) -> list[Batch]:
    """Paste two digits on each canvas, one in its left half and one in its right, each 8 to 16 pixels wide."""
    digits = load_digits()
    drawings, names = torch.from_numpy(digits.images).float() / 16, torch.from_numpy(digits.target)
    count = num_batches * batch_size
    images = 0.1 * torch.randn(count, 1, image_size, image_size)
    chosen = torch.randint(len(names), (count, 2))
    boxes = torch.zeros(count, 2, 4)
    for number in range(count):
        for half in range(2):
            size = int(torch.randint(8, image_size // 2 + 1, ()))
            left = half * (image_size // 2) + int(torch.randint(image_size // 2 - size + 1, ()))
            top = int(torch.randint(image_size - size + 1, ()))
            drawing = F.interpolate(drawings[chosen[number, half]][None, None], size=(size, size), mode="bilinear")
            images[number, :, top : top + size, left : left + size] += drawing[0]
            boxes[number, half] = torch.tensor([left, top, left + size, top + size])
    parts = (images, boxes, names[chosen])
    return list(zip(*(part.split(batch_size) for part in parts), strict=True))


class Detector(nn.Module):
    """Returns losses in training mode and predictions in eval mode, as torchvision's detectors do."""

    def __init__(self, width: int, image_size: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for num_inputs, num_outputs, stride in ((1, width, 2), (width, 2 * width, 2), (2 * width, 4 * width, 1)):
            layers += [
                nn.Conv2d(num_inputs, num_outputs, 3, stride=stride, padding=1, bias=False),
                nn.BatchNorm2d(num_outputs),
                nn.ReLU(inplace=True),
            ]
        self.body = nn.Sequential(*layers)
        self.classify = nn.Conv2d(4 * width, BACKGROUND + 1, 3, padding=1)
        self.regress = nn.Conv2d(4 * width, 4, 3, padding=1)
        centres = torch.arange(image_size // STRIDE) * STRIDE + STRIDE / 2
        y, x = torch.meshgrid(centres, centres, indexing="ij")
        side = torch.full_like(x, 12.0)
        self.register_buffer("anchors", torch.stack([x, y, side, side], dim=-1).flatten(0, 1))

    def forward(
        self, images: torch.Tensor, boxes: torch.Tensor | None = None, digits: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        hidden = self.body(images)
        logits = self.classify(hidden).flatten(2).transpose(1, 2)
        offsets = self.regress(hidden).flatten(2).transpose(1, 2)
        if self.training:
            return self.losses(logits, offsets, boxes, digits)
        centres = self.anchors[:, :2] + offsets[..., :2] * self.anchors[:, 2:]
        sides = self.anchors[:, 2:] * offsets[..., 2:].exp()
        found = box_convert(torch.cat([centres, sides], dim=-1).float(), "cxcywh", "xyxy")
        return {"boxes": found, "scores": logits.float().softmax(-1)}

    def losses(
        self, logits: torch.Tensor, offsets: torch.Tensor, boxes: torch.Tensor, digits: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """Match each anchor to the box that it overlaps most, to none below 0.4, and each box to its best anchor."""
        anchors = box_convert(self.anchors.float(), "cxcywh", "xyxy")
        overlaps = torch.stack([box_iou(anchors, there) for there in boxes])
        best, matched = overlaps.max(2)
        is_best = overlaps == overlaps.max(1, keepdim=True).values
        matched = torch.where(is_best.any(2), is_best.long().argmax(2), matched)
        is_object = (best >= 0.4) | is_best.any(2)
        wanted = box_convert(boxes.gather(1, matched[..., None].expand(-1, -1, 4)), "xyxy", "cxcywh")
        shifts = (wanted[..., :2] - self.anchors[:, :2]) / self.anchors[:, 2:]
        scales = (wanted[..., 2:] / self.anchors[:, 2:]).log()
        names = torch.where(is_object, digits.gather(1, matched), BACKGROUND)
        return {
            "classes": F.cross_entropy(logits.flatten(0, 1), names.flatten()),
            "boxes": F.smooth_l1_loss(offsets[is_object], torch.cat([shifts, scales], dim=-1)[is_object]),
        }


def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    return sum(model(*batch).values())


def evaluate(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return one minus the overlap, and the overlap: of each digit's box with the one that is likeliest that digit."""
    images, boxes, digits = batch
    found = model(images)
    likeliest = found["scores"].gather(2, digits[:, None].expand(-1, found["scores"].size(1), -1)).argmax(1)
    chosen = found["boxes"].gather(1, likeliest[..., None].expand(-1, -1, 4))
    overlap = torch.stack([box_iou(mine, there).diagonal() for mine, there in zip(chosen, boxes, strict=True)]).mean()
    return 1 - overlap, overlap


def task(width: int = 16, image_size: int = 32, num_batches: int = 40, batch_size: int = 32) -> autoprec.Task:
    batches = make_batches(num_batches, batch_size, image_size)
    held_out = max(1, num_batches // 5)
    return autoprec.Task(
        name="detector",
        model=lambda: Detector(width, image_size),
        train_batches=batches[held_out:],
        eval_batches=batches[:held_out],
        loss=loss,
        evaluate=evaluate,
        metric_name="overlap",
        optimizer_settings={"lr": 3e-3},
    )
