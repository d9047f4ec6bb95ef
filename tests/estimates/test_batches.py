from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch

from autoprec.errors import TaskError
from autoprec.estimates.batches import map_tensors, num_samples_of, resize_batch, tensors_of


class Pair(NamedTuple):
    images: torch.Tensor
    labels: torch.Tensor


@dataclass(frozen=True)
class Record:
    images: torch.Tensor
    name: str


def test_mapping_keeps_the_class_of_every_container() -> None:
    ones = torch.ones(2)
    batch = {
        "pair": Pair(ones, ones),
        "ordered": OrderedDict(a=ones),
        "record": Record(ones, "x"),
        "list": [ones, None, 3],
    }
    doubled = map_tensors(batch, lambda tensor: tensor * 2)
    assert isinstance(doubled["pair"], Pair)
    assert isinstance(doubled["ordered"], OrderedDict)
    assert isinstance(doubled["record"], Record)
    assert doubled["record"].name == "x"
    assert doubled["list"][1:] == [None, 3]
    assert [tensor.tolist() for tensor in tensors_of(doubled)] == [[2.0, 2.0]] * 5
    assert ones.tolist() == [1.0, 1.0]
    assert batch["record"].images is ones


def test_samples_are_the_first_dimension_of_the_first_tensor_that_has_one() -> None:
    assert num_samples_of({"scale": torch.tensor(1.0), "x": torch.zeros(5, 2)}) == 5
    with pytest.raises(TaskError, match="num_samples"):
        num_samples_of({"scale": torch.tensor(1.0)})


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
