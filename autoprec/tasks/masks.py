"""Images with a class for every pixel: the ink of digits, or one's own folder of masks."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torchvision.transforms import v2 as transforms

from autoprec.errors import TaskError, UsageError, did_you_mean
from autoprec.tasks.epochs import EpochBatches, check_batch_size, split_indices
from autoprec.tasks.images import FileImages, PixelImages, load_images

__all__ = ["IGNORED", "MASK_NAMES", "MaskData", "Masked", "load_masks", "mask_batches"]

IGNORED = 255
"""Label of a pixel that counts neither in the loss nor in the metric: what Pascal VOC and its followers use."""
MASK_NAMES = ("digits", "mnist", "masks:PATH")
INK = 0.5
"""A pixel of a digit is ink from half of the largest value."""
IMAGE_ENDINGS = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff")


class Masked(Protocol):
    """Images with masks; `load` makes one batch: (n, 3, size, size) float32, normalised, and (n, size, size) int64."""

    def __len__(self) -> int: ...

    def load(self, indices: Sequence[int], *, size: int) -> tuple[torch.Tensor, torch.Tensor]: ...


@dataclass(frozen=True, slots=True)
class MaskData:
    """A data set with its two splits. Class 0 is the background; `digest` stands for the content."""

    name: str
    num_classes: int
    train: Masked
    held_out: Masked
    digest: str


@dataclass(frozen=True, slots=True, eq=False)
class InkMasks:
    """Digits: a pixel of ink has the class of the digit plus one, every other is background."""

    images: PixelImages

    def __len__(self) -> int:
        return len(self.images.labels)

    def load(self, indices: Sequence[int], *, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        chosen = torch.as_tensor(indices)
        pixels = self.images.pixels[chosen].float() / self.images.largest
        ink = F.interpolate(pixels, size=(size, size), mode="bilinear", antialias=size < pixels.shape[-1])[:, 0] > INK
        masks = ink * (self.images.labels[chosen] + 1)[:, None, None]
        return self.images.load(indices, size=size), masks


@dataclass(frozen=True, slots=True, eq=False)
class FileMasks:
    """Images and masks in files of one name; a mask's shorter side goes to `size`, by the nearest pixel, as its
    image's does."""

    images: FileImages
    masks: Sequence[str]

    def __len__(self) -> int:
        return len(self.masks)

    def load(self, indices: Sequence[int], *, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        fit = transforms.Compose(
            [
                transforms.Resize(size, interpolation=transforms.InterpolationMode.NEAREST),
                transforms.CenterCrop(size),
            ]
        )
        masks = [fit(_read_mask(self.masks[index])[None])[0] for index in indices]
        return self.images.load(indices, size=size), torch.stack(masks).long()


def mask_batches(data: MaskData, *, image_size: int, batch_size: int) -> tuple[EpochBatches, EpochBatches]:
    """Return training and held-out batches of (images, masks), resized to `image_size`.

    Raises:
        UsageError, TaskError: a batch size that the data cannot fill.
    """
    num_train, num_held_out = len(data.train), len(data.held_out)
    check_batch_size(batch_size, data=data.name, num_train=num_train, num_held_out=num_held_out, noun="images")
    return (
        EpochBatches(_Sized(data.train, image_size), num_train, batch_size, shuffle=True),
        EpochBatches(_Sized(data.held_out, image_size), num_held_out, batch_size, shuffle=False),
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Sized:
    images: Masked
    image_size: int

    def __call__(self, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.images.load(indices.tolist(), size=self.image_size)


def load_masks(data: str = "digits", *, seed: int = 0) -> MaskData:
    """Load a data set by name: `digits` and `mnist`, whose ink is labelled, or `masks:PATH`.

    PATH holds the folders `images` and `masks` with files of one name; a mask is a PNG whose values are the classes,
    0 the background, 255 ignored. A fifth is held out by `seed`.

    Raises:
        UsageError: an unknown name, a path where none belongs or none where one does.
        TaskError: the data is missing, empty, or an image has no mask.
    """
    name, _, path = data.partition(":")
    if name == "masks":
        if not path:
            raise UsageError("data 'masks' needs a folder: masks:PATH")
        return _load_folder(Path(path), seed)
    if name not in ("digits", "mnist"):
        raise UsageError(f"data {name!r}; allowed: {', '.join(MASK_NAMES)}{did_you_mean(name, MASK_NAMES)}")
    images = load_images(data, seed=seed)
    assert isinstance(images.train, PixelImages)
    assert isinstance(images.held_out, PixelImages)
    return MaskData(name, images.num_classes + 1, InkMasks(images.train), InkMasks(images.held_out), images.digest)


def _load_folder(root: Path, seed: int) -> MaskData:
    found = {folder: _files(root / folder) for folder in ("images", "masks")}
    missing = [name for name in found["images"] if name not in found["masks"]]
    if missing:
        raise TaskError(f"data 'masks': {len(missing)} images have no mask of their name: {', '.join(missing[:4])}")
    names = sorted(found["images"])
    if not names:
        raise TaskError(f"data 'masks': {root.name!r} holds no images (endings: {', '.join(IMAGE_ENDINGS)})")
    largest = [_largest_class(found["masks"][name], found["images"][name]) for name in names]
    splits = [
        FileMasks(
            FileImages([(str(found["images"][names[i]]), 0) for i in part.tolist()], torch.zeros(len(part))),
            [str(found["masks"][names[i]]) for i in part.tolist()],
        )
        for part in split_indices(len(names), seed=seed)
    ]
    digest = hashlib.sha256("\n".join(f"{name}/{value}" for name, value in zip(names, largest, strict=True)).encode())
    return MaskData("masks", max(largest) + 1, splits[0], splits[1], digest.hexdigest()[:16])


def _files(folder: Path) -> dict[str, Path]:
    if not folder.is_dir():
        raise TaskError(f"data 'masks': there is no folder {folder.name!r} in {folder.parent.name!r}")
    return {file.stem: file for file in folder.iterdir() if file.suffix.lower() in IMAGE_ENDINGS}


def _largest_class(file: Path, image: Path) -> int:
    """Return the largest class of a mask, which has to have its image's size: resized, it would label other pixels.

    Raises:
        TaskError: another size, or a file that cannot be read.
    """
    values = _read_mask(str(file))
    found, wanted = (values.shape[1], values.shape[0]), _image_size(image)
    if found != wanted:
        raise TaskError(
            f"mask {file.name!r} has {found[0]} x {found[1]} pixels and its image {image.name!r} {wanted[0]} x"
            f" {wanted[1]}; one size is needed"
        )
    return int(values[values != IGNORED].max()) if (values != IGNORED).any() else 0


def _image_size(file: Path) -> tuple[int, int]:
    from PIL import Image

    try:
        with Image.open(file) as image:
            return image.size
    except OSError as error:
        raise TaskError(f"image {file.name!r} cannot be read ({type(error).__name__})") from error


def _read_mask(path: str) -> torch.Tensor:
    """Return (height, width) uint8 classes.

    Raises:
        TaskError: no image, or one in colours without a palette.
    """
    import numpy as np
    from PIL import Image

    try:
        if not Path(path).is_file():  # a pipe may never say anything
            raise OSError("no regular file")
        with Image.open(path) as image:
            values: Any = np.array(image)
    except Exception as error:  # of a damaged file Pillow raises whatever its decoder happens to
        raise TaskError(f"mask {Path(path).name!r} cannot be read ({type(error).__name__})") from error
    if values.ndim != 2 or values.dtype != np.uint8:
        raise TaskError(f"mask {Path(path).name!r} has shape {values.shape} and {values.dtype}; one byte a pixel")
    return torch.from_numpy(values)
