"""A dispatch mode that watches untyped storages, fake or real, by weak reference, and notes each operator."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, get_args

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from autoprec.estimates.batches import tensors_of
from autoprec.estimates.operations import Operation, describe_operation, flat_tensors, runs_no_kernel

__all__ = ["Category", "CATEGORIES", "Phase", "PhaseMark", "StorageRecord", "StorageTracker"]

Phase = Literal["before", "forward", "backward", "optimizer"]
PhaseMark = tuple[int, Phase]
"""The clock at which a phase began."""

Category = Literal[
    "parameters",
    "gradients",
    "optimizer_state",
    "activations",
    "weight_casts",
    "buffers",
    "inputs",
    "temporaries",
]
CATEGORIES: tuple[Category, ...] = get_args(Category)

_FOREVER = 2**62
_WEIGHT_CASTS = {torch.ops.aten._to_copy}


class StorageRecord:
    """The life of one storage: its bytes, the unit and phase that made it, the events of its birth and death."""

    __slots__ = ("__weakref__", "born", "category", "died", "num_bytes", "phase", "unit")

    def __init__(self, num_bytes: int, *, unit: str, phase: Phase, born: int, category: Category | None) -> None:
        self.num_bytes = num_bytes
        self.unit = unit
        self.phase = phase
        self.born = born
        self.died = _FOREVER
        self.category = category


class StorageTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Record every storage that operators make while the mode is on, and, where asked, every operator.

    Works below autograd, over fake tensors and over real ones. A mode that adds work of its own (emulated half
    arithmetic) is entered outside of this one, so that its temporaries are not seen. It holds no tensor alive.

    Attributes:
        cuda_dropout: count the random mask of dropout as one byte an element, as CUDA's fused kernel keeps it, instead
            of the CPU's mask in the dtype of the input.
        clock: events so far; births and deaths are stamped with it.
        phase: what the step is doing; `enter` changes it.
        phases: when each phase began.
        repeats: given to the operators that are recorded.
    """

    def __init__(self, *, cuda_dropout: bool = True) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.cuda_dropout = cuda_dropout
        self.clock = 0
        self.phase: Phase = "before"
        self.phases: list[PhaseMark] = []
        self.repeats = 1
        self.records_operators = False
        self.records: list[StorageRecord] = []
        self.operations: list[Operation] = []
        self._live: dict[int, tuple[weakref.ref[Any], StorageRecord]] = {}
        self._units: list[str] = []
        self._backward_unit = ""

    @property
    def unit(self) -> str:
        """The module that runs now; in a backward pass the one whose output's gradient came last."""
        if self._units:
            return self._units[-1]
        return self._backward_unit if self.phase == "backward" else ""

    def enter(self, phase: Phase, *, repeats: int = 1) -> None:
        """Begin a phase, whose operators run `repeats` times in one step."""
        self.phase = phase
        self.repeats = repeats
        self.phases.append((self._tick(), phase))

    def watch(self, tensor: torch.Tensor, category: Category | None = None, unit: str | None = None) -> StorageRecord:
        """Record the tensor's storage, or label it where it is known; None keeps what is there."""
        storage = tensor.untyped_storage()
        known = self._live.get(id(storage))
        if known is None:
            record = self._add(storage, category=category)
        else:
            record = known[1]
            record.category = category or record.category
        if unit is not None:
            record.unit = unit
        return record

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func.namespace == "prim":
            return result
        for tensor in flat_tensors((result,)):
            storage = tensor.untyped_storage()
            if id(storage) not in self._live:
                self._add(storage, category=self._category_of(func, args))
        if self.cuda_dropout and func.overloadpacket is torch.ops.aten.bernoulli_ and self.phase != "before":
            self._shrink_mask(args[0])
        if self.records_operators and not runs_no_kernel(func):
            operation = describe_operation(
                func, args, kwargs, result, unit=self.unit, phase=self.phase, repeats=self.repeats
            )
            self.operations.append(operation)
        return result

    def _category_of(self, func: Any, args: Any) -> Category | None:
        if func.overloadpacket in _WEIGHT_CASTS:
            known = self._live.get(id(args[0].untyped_storage()))
            if known is not None and known[1].category == "parameters":
                return "weight_casts"
        if self.phase == "backward":
            return "activations" if torch.is_grad_enabled() else None
        return None

    def _shrink_mask(self, mask: torch.Tensor) -> None:
        known = self._live.get(id(mask.untyped_storage()))
        if known is not None:
            known[1].num_bytes = min(known[1].num_bytes, mask.numel())

    def _add(self, storage: torch.UntypedStorage, *, category: Category | None) -> StorageRecord:
        key = id(storage)
        record = StorageRecord(storage.nbytes(), unit=self.unit, phase=self.phase, born=self._tick(), category=category)
        self.records.append(record)
        self._live[key] = (weakref.ref(storage, functools.partial(self._drop, key)), record)
        return record

    def _drop(self, key: int, reference: weakref.ref[Any]) -> None:
        known = self._live.get(key)
        if known is not None and known[0] is reference:
            known[1].died = self._tick()
            del self._live[key]

    def _tick(self) -> int:
        self.clock += 1
        return self.clock

    @contextmanager
    def following(self, model: nn.Module) -> Iterator[None]:
        """Follow which module runs, by forward hooks on `model`'s modules that are taken off at the end."""
        handles = []
        for name, module in model.named_modules():
            called = functools.partial(self._call, name)
            returned = functools.partial(self._return, name)
            handles.append(module.register_forward_pre_hook(called, prepend=True))
            handles.append(module.register_forward_hook(returned, always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            self._units.clear()

    def _call(self, name: str, module: nn.Module, args: Any) -> None:
        self._units.append(name)

    def _return(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        if self._units:
            self._units.pop()
        for tensor in tensors_of(output):
            if tensor.requires_grad and not getattr(tensor, "_autoprec_followed", False):
                tensor._autoprec_followed = True  # type: ignore[attr-defined]
                tensor.register_hook(functools.partial(self._enter_backward, name))  # type: ignore[no-untyped-call]

    def _enter_backward(self, name: str, gradient: torch.Tensor) -> None:
        self._backward_unit = name
