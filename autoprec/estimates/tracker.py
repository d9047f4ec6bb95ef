"""A dispatch mode that watches untyped storages, fake or real, by weak reference, and notes each operator."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, get_args

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from autoprec.errors import TaskError
from autoprec.estimates.operations import Operation, describe_operation, flat_tensors, runs_no_kernel
from autoprec.tasks.batches import tensors_of

__all__ = ["Category", "CATEGORIES", "Phase", "PhaseMark", "StorageRecord", "StorageTracker"]

Phase = Literal["before", "forward", "backward", "warm_up", "optimizer"]
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
_MAKES_MASK = {torch.ops.aten.bernoulli_, torch.ops.aten.div_}


class StorageRecord:
    """The life of one storage: its bytes, the unit and phase that made it, the events of its birth and death."""

    __slots__ = ("born", "category", "died", "is_mask", "num_bytes", "phase", "unit")

    def __init__(self, num_bytes: int, *, unit: str, phase: Phase, born: int, category: Category | None) -> None:
        self.num_bytes = num_bytes
        self.unit = unit
        self.phase = phase
        self.born = born
        self.died = _FOREVER
        self.category = category
        self.is_mask = False


class StorageTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Record every storage that operators make while the mode is on, and, where asked, every operator.

    Works below autograd, over fake tensors and over real ones. A mode that adds work of its own (emulated half
    arithmetic) is entered outside of this one, so that its temporaries are not seen. It holds no tensor alive.

    Attributes:
        fake: the step runs under fake tensors; a real tensor that would get a fake gradient is refused.
        cuda_dropout: charge dropout as CUDA's one kernel with a mask of one byte an element, instead of the CPU's three
            kernels with a mask in the dtype of the input.
        clock: events so far; births and deaths are stamped with it.
        phase: what the step is doing; `enter` changes it.
        phases: when each phase began.
        repeats: given to the operators that are recorded.
    """

    def __init__(self, *, fake: bool = False, cuda_dropout: bool = True) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.fake = fake
        self.cuda_dropout = cuda_dropout
        self.clock = 0
        self.phase: Phase = "before"
        self.phases: list[PhaseMark] = []
        self.repeats = 1
        self.records_operators = False
        self.records: list[StorageRecord] = []
        self.operations: list[Operation] = []
        self._live: dict[int, tuple[weakref.ref[Any], StorageRecord]] = {}
        self._has_masks = False
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

    def settle_warm_up(self, start: int) -> None:
        """Let the optimizer state that the warm-up made be there since `start`; forget what else lived in it."""
        for record in self.records:
            if record.phase == "warm_up" and record.category == "optimizer_state":
                record.born = start
        self.records = [record for record in self.records if record.phase != "warm_up" or record.born == start]

    def watch(self, tensor: torch.Tensor, category: Category, unit: str) -> None:
        """Record the storage of a strided tensor, or label it where it is known."""
        if tensor.layout is not torch.strided:
            return
        storage = tensor.untyped_storage()
        known = self._live.get(id(storage))
        record = self._add(storage, category=category) if known is None else known[1]
        record.category = category
        record.unit = unit

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.fake:
            _refuse_real_leaves(args)
        result = func(*args, **kwargs)
        if func.namespace == "prim":
            return result
        for tensor in flat_tensors((result,)):
            storage = tensor.untyped_storage()
            if id(storage) not in self._live:
                self._add(storage, category=self._category_of(func, args))
        if self.cuda_dropout and func.overloadpacket is torch.ops.aten.bernoulli_:
            self._shrink_mask(args[0])
        if self.records_operators and not runs_no_kernel(func):
            self._note(func, args, kwargs, result)
        return result

    def _note(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        masks = self._masks(flat_tensors(args)) if self._has_masks else ()
        if masks and func.overloadpacket in _MAKES_MASK:
            return
        operation = describe_operation(
            func, args, kwargs, result, unit=self.unit, phase=self.phase, repeats=self.repeats, masks=masks
        )
        self.operations.append(operation)

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
        if known is not None and mask.is_floating_point():
            known[1].num_bytes = mask.numel()
            known[1].is_mask = self._has_masks = True

    def _masks(self, tensors: Iterator[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        known = ((tensor, self._live.get(id(tensor.untyped_storage()))) for tensor in tensors)
        return tuple(tensor for tensor, found in known if found is not None and found[1].is_mask)

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
        """Follow which module runs, by forward hooks on `model`'s modules that are taken off at the end.

        Scripted modules take no hooks: what they do is their parent's.
        """
        handles = []
        for name, module in model.named_modules():
            if isinstance(module, torch.jit.ScriptModule):
                continue
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


def _refuse_real_leaves(args: Any) -> None:
    for tensor in flat_tensors(args):
        if tensor.requires_grad and not isinstance(tensor, FakeTensor):
            raise TaskError(
                f"loss: uses a trainable tensor of shape {tuple(tensor.shape)} that is no parameter of the model;"
                " loss(model, batch) calls the model that it is given"
            )
