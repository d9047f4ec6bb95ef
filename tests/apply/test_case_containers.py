"""Reported situations with their right values: inputs and outputs of every kind, and edits of them."""

from __future__ import annotations

from collections import OrderedDict, UserDict, deque
from dataclasses import dataclass
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from apply_models import Calls
from torch import nn

from autoprec import Policy, apply_policy

HALF, BFLOAT, FULL = torch.float16, torch.bfloat16, torch.float32
HALF, BFLOAT, FULL = torch.float16, torch.bfloat16, torch.float32


# C05: inputs of every kind


class Batch(NamedTuple):
    x: torch.Tensor
    ids: torch.Tensor


@dataclass
class Data:
    x: torch.Tensor
    name: str


class Pair(tuple):
    def __new__(cls, a: Any, b: Any) -> Any:
        return super().__new__(cls, (a, b))


class Output(OrderedDict):  # as model libraries return: a mapping whose items are attributes too
    def __init__(self, x: torch.Tensor) -> None:
        super().__init__(x=x)
        self.x = x


CONTAINERS = {
    "tuple": (lambda x: (x, 1), lambda v: v[0]),
    "own tuple": (lambda x: Pair(x, 1), lambda v: v[0]),
    "list": (lambda x: [x, None], lambda v: v[0]),
    "dict": (lambda x: {"a": x, "ids": torch.tensor([1])}, lambda v: v["a"]),
    "named tuple": (lambda x: Batch(x, torch.tensor([1])), lambda v: v.x),
    "dataclass": (lambda x: Data(x, "n"), lambda v: v.x),
    "namespace": (lambda x: SimpleNamespace(x=x, n=1), lambda v: v.x),
    "ordered dict": (lambda x: OrderedDict(a=x), lambda v: v["a"]),
    "user dict": (lambda x: UserDict(a=x), lambda v: v["a"]),
    "mapping proxy": (lambda x: MappingProxyType({"a": x}), lambda v: v["a"]),
    "deque": (lambda x: deque([x], maxlen=3), lambda v: v[0]),
    "model output": (lambda x: Output(x), lambda v: v.x),
    "nested": (lambda x: [{"a": (x,)}], lambda v: v[0]["a"][0]),
    "return type": (lambda x: torch.max(x, dim=-1, keepdim=True), lambda v: v.values),
}


@pytest.mark.parametrize(("wrap", "get"), CONTAINERS.values(), ids=CONTAINERS.keys())
def test_c05_containers_keep_their_class_inside_and_out(wrap: Any, get: Any) -> None:
    seen: list[Any] = []

    def look(module: nn.Module, value: Any, *, also: Any) -> Any:
        seen.extend((value, also))
        return value

    model = apply_policy(Calls(lambda m, v: m.inner(v, also=v), inner=Calls(look)), Policy(modules={"inner": "fp16"}))
    given = wrap(torch.ones(1, 4))
    returned = model(given)
    for inside in seen:
        assert type(inside) is type(given)
        assert get(inside).dtype == HALF
    assert type(returned) is type(given)
    assert get(returned).dtype == FULL
    assert get(given).dtype == FULL
    if isinstance(given, Output):
        assert returned["x"] is returned.x
    if isinstance(given, deque):
        assert returned.maxlen == 3


def test_c05_only_floating_tensors_of_32_bits_and_less_are_cast() -> None:
    seen: dict[str, Any] = {}
    model = Calls(lambda m, x, mask=None, *, state: seen.update(x=x, mask=mask, state=state))
    apply_policy(model, Policy(default="fp16"))
    given = {
        "a": torch.ones(1, 4),
        "ids": torch.tensor([1]),
        "double": torch.ones(1, dtype=torch.float64),
        "complex": torch.ones(1, dtype=torch.complex64),
        "bool": torch.tensor([True]),
        "text": "t",
        "number": 2.5,
    }
    model(given, state=(None, torch.tensor([True])))
    inside = seen["x"]
    assert inside["a"].dtype == HALF
    assert all(inside[key] is given[key] for key in given if key != "a")
    assert seen["mask"] is None
    assert seen["state"][0] is None


def test_c05_edits_of_the_callers_containers_and_tensors_are_not_lost() -> None:
    def edit(module: nn.Module, values: dict[str, Any], items: list[Any], x: torch.Tensor) -> None:
        values["new"] = values["a"] * 3
        values["b"] = torch.zeros(1)
        del values["gone"]
        items.append(torch.full((1,), 5.0))
        x.add_(1)

    model = apply_policy(Calls(lambda m, *v: m.inner(*v), inner=Calls(edit)), Policy(modules={"inner": "bf16"}))
    values = {"a": torch.ones(1), "b": torch.ones(1), "gone": torch.ones(1)}
    items, x, first = [torch.ones(1)], torch.ones(2), values["a"]
    model(values, items, x)
    assert sorted(values) == ["a", "b", "new"]
    assert values["a"] is first
    assert (values["new"].item(), values["b"].item(), items[1].item()) == (3.0, 0.0, 5.0)
    assert x.tolist() == [2.0, 2.0]


def test_c05_edits_of_attributes_reach_the_caller_and_one_object_stays_one() -> None:
    def edit(module: nn.Module, state: Any, data: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        state.new, state.x = state.x * 3, state.x + 1
        del state.gone
        data.x = data.x + 4
        x.add_(1)
        return y

    model = apply_policy(Calls(lambda m, *v: m.inner(*v), inner=Calls(edit)), Policy(modules={"inner": "bf16"}))
    state, data, x = SimpleNamespace(x=torch.ones(1), gone=1), Data(torch.ones(1), "n"), torch.ones(2)
    assert model(state, data, x, x).tolist() == [2.0, 2.0]
    assert x.tolist() == [2.0, 2.0]
    assert sorted(vars(state)) == ["new", "x"]
    assert (state.new.item(), state.x.item(), data.x.item()) == (3.0, 2.0, 5.0)
