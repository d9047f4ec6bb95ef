"""Batches of every shape: counted, moved and gone through again."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Iterator
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch

from autoprec.errors import TaskError
from autoprec.tasks import Task
from autoprec.tasks.batches import (
    BatchStream,
    count_samples,
    cut_batch,
    longest_batch,
    map_tensors,
    move_batch,
    tensors_of,
)
from autoprec.tasks.protocol import OneShot


class Pair(NamedTuple):
    x: torch.Tensor
    ids: Any


@dataclasses.dataclass(frozen=True)
class Record:
    x: torch.Tensor
    name: str = "r"


@dataclasses.dataclass
class Computed:
    """A dataclass with a field that its constructor does not take."""

    x: torch.Tensor
    length: int = dataclasses.field(init=False)
    half: torch.Tensor = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.length, self.half = len(self.x), self.x[:2]


X = torch.zeros(4, 2)
BATCHES = [
    X,
    (X, None, "text"),
    [X, 3],
    {"x": X, "deep": {"y": (X,)}},
    OrderedDict(x=X),
    defaultdict(list, x=X),
    UserDict(x=X),
    Computed(X),
    Pair(X, [1, 2]),
    Record(X),
]
IDS = [type(batch).__name__ for batch in BATCHES]


@pytest.mark.parametrize("batch", BATCHES, ids=IDS)
def test_containers_keep_their_class_and_other_values(batch: Any) -> None:
    moved = map_tensors(lambda tensor: tensor + 1, batch)
    assert type(moved) is type(batch)
    tensors = tensors_of(moved)
    assert tensors
    assert all(bool((tensor == 0).all()) for tensor in tensors_of(batch))
    assert all(bool((tensor == 1).all()) for tensor in tensors)
    if isinstance(batch, Record):
        assert moved.name == "r"
    if isinstance(batch, Computed):
        assert (moved.length, len(tensors)) == (4, 2)
    if isinstance(batch, defaultdict):
        assert moved["missing"] == []
    if isinstance(batch, Pair):
        assert moved.ids == [1, 2]


@pytest.mark.parametrize("batch", BATCHES, ids=IDS)
def test_tensors_in_place_are_not_moved_or_copied(batch: Any) -> None:
    assert move_batch(batch, torch.device("cpu")) is batch


def test_tensors_elsewhere_are_moved() -> None:
    moved = move_batch({"x": X, "ids": [1]}, torch.device("meta"))
    assert moved["x"].device.type == "meta"
    assert moved["ids"] == [1]


@pytest.mark.parametrize("batch", BATCHES, ids=IDS)
def test_samples_are_the_first_dimension_of_the_first_tensor(batch: Any) -> None:
    assert count_samples(batch) == 4


def test_a_mapping_that_cannot_be_copied_becomes_a_dict() -> None:
    assert map_tensors(lambda tensor: tensor + 1, MappingProxyType({"n": torch.tensor(3.0)})) == {"n": 4.0}


@pytest.mark.parametrize("batch", ["text", {"n": torch.tensor(3.0)}, ()], ids=["text", "a scalar", "nothing"])
def test_a_batch_without_a_batch_dimension_says_what_to_give(batch: Any) -> None:
    with pytest.raises(TaskError, match="num_samples=function"):
        count_samples(batch)


def numbered(*sizes: int) -> list[torch.Tensor]:
    return [torch.full((size, 1), float(index)) for index, size in enumerate(sizes)]


def drawn(stream: BatchStream, count: int) -> list[int]:
    return [int(next(stream)[0, 0]) for _ in range(count)]


def test_batches_start_again_where_they_end() -> None:
    assert drawn(BatchStream(numbered(2, 2, 2)), 7) == [0, 1, 2, 0, 1, 2, 0]


def test_a_loader_without_a_length_is_enough() -> None:
    def loader() -> Iterator[torch.Tensor]:
        yield from numbered(2, 2)

    assert drawn(BatchStream(loader), 5) == [0, 1, 0, 1, 0]


def test_a_last_batch_of_one_sample_is_left_out_with_one_note() -> None:
    notes: list[str] = []
    stream = BatchStream(numbered(4, 4, 1), on_note=notes.append)
    assert drawn(stream, 5) == [0, 1, 0, 1, 0]
    assert notes == ["a training batch of one sample was left out: normalisation needs at least two"]


def test_a_first_batch_of_one_sample_is_left_out_where_the_next_is_larger() -> None:
    assert drawn(BatchStream(numbered(1, 4, 4)), 3) == [1, 2, 1]


def test_where_all_batches_have_one_sample_they_are_used() -> None:
    assert drawn(BatchStream(numbered(1, 1)), 3) == [0, 1, 0]
    assert drawn(BatchStream(OneShot(iter(numbered(1)))), 1) == [0]


def test_no_batches_is_an_error_with_the_number() -> None:
    with pytest.raises(TaskError, match="there are 0 training batches"):
        next(BatchStream([]))


def small_task(**changes: Any) -> Task:
    nothing: dict[str, Any] = {"name": "t", "model": None, "train_batches": [], "eval_batches": [], "loss": None}
    return Task(**(nothing | changes))


def test_a_one_shot_iterator_that_is_too_short_says_how_many_it_gave() -> None:
    task = small_task(train_batches=iter(numbered(2, 2, 2, 2, 2)))
    stream = BatchStream(task.train_batches, num_needed=20)
    assert drawn(stream, 5) == [0, 1, 2, 3, 4]
    with pytest.raises(TaskError, match="one-shot iterator that gave only 5 of 20 batches"):
        next(stream)


def test_a_one_shot_iterator_gives_every_trial_the_same_batches() -> None:
    task = small_task(train_batches=iter(numbered(2, 2, 2, 2)))
    assert drawn(BatchStream(task.train_batches), 2) == [0, 1]
    assert drawn(BatchStream(task.train_batches), 4) == [0, 1, 2, 3]


def test_a_function_that_returns_one_exhausted_iterator_is_told_from_a_fresh_one() -> None:
    iterator = iter(numbered(2, 2))
    stream = BatchStream(lambda: iterator, num_needed=3)
    assert drawn(stream, 2) == [0, 1]
    with pytest.raises(TaskError, match="gave only 2 of 3 batches"):
        next(stream)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"metric_direction": "up"}, "metric_direction is 'up'; allowed: maximize, minimize"),
        ({"accumulation_steps": 0}, "accumulation_steps is 0"),
    ],
    ids=["direction", "accumulation"],
)
def test_a_task_with_a_bad_field_names_the_field(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(TaskError, match=message):
        small_task(**changes)


def test_a_batch_is_cut_where_its_tensors_count_the_samples() -> None:
    batch = Pair(torch.arange(12).view(6, 2), [torch.arange(6), torch.ones(3), "text"])
    cut = cut_batch(batch, size=4)
    assert cut.x.tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert [cut.ids[0].tolist(), cut.ids[1].tolist(), cut.ids[2]] == [[0, 1, 2, 3], [1, 1, 1], "text"]
    assert cut_batch(batch, size=6) is batch
    by_task = cut_batch(torch.zeros(16, 6), size=4, num_samples=lambda b: b.shape[1])
    assert by_task.shape == (16, 6)


def test_the_longest_batch_is_found_among_a_list_or_the_first_of_a_loader() -> None:
    data = [{"ids": torch.zeros(4, length)} for length in (3, 9, 5, 11)]
    assert longest_batch(data, max_batches=1) is data[3]
    assert longest_batch(lambda: iter(data), max_batches=3) is data[1]
