"""How near a forward pass comes to the end of FP16: the largest finite half value that any operator gives."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from autoprec.apply import read_structure

__all__ = ["LargestHalf", "watch_headroom"]

END_OF_FP16 = 65504.0
UNWRITTEN = ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided")
"""Operators whose results hold what was in memory before: dropout fills its mask only after it."""


@dataclass(slots=True)
class LargestHalf:
    """The largest magnitude below FP16's largest number, and the module in whose code it came up ("" is the model).

    Infinite values and +-65504 itself are masks as often as accidents and do not count.
    """

    value: float = 0.0
    module: str = ""


@contextmanager
def watch_headroom(model: nn.Module, largest: LargestHalf) -> Iterator[None]:
    """Note the largest half value of the forward passes inside the block in `largest`; backward passes do not count.

    Loss scaling moves gradients to the end of FP16 on purpose. Enter it inside `emulate()`, not around it. On a GPU
    each operator waits for its result: never around what is timed.
    """
    structure = read_structure(model)
    names = {identity: aliases[0] for identity, aliases in structure.names.items()}
    running: list[str] = []

    def before(module: nn.Module, args: Any) -> None:
        if id(module) in names:
            running.append(names[id(module)])

    def after(module: nn.Module, args: Any, output: Any) -> None:
        if id(module) in names:
            running.pop()

    with ExitStack() as stack:
        stack.enter_context(_Values(largest, running))
        stack.callback(register_module_forward_pre_hook(before).remove)
        stack.callback(register_module_forward_hook(after, always_call=True).remove)
        yield


class _Values(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, largest: LargestHalf, running: list[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._largest = largest
        self._running = running

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if (
            torch._C._current_graph_task_id() == -1
            and not func.is_view
            and func.overloadpacket.__name__ not in UNWRITTEN
        ):
            for leaf in tree_leaves(result):
                if isinstance(leaf, torch.Tensor) and leaf.dtype == torch.float16 and leaf.numel():
                    self._look(leaf)
        return result

    def _look(self, tensor: torch.Tensor) -> None:
        low, high = (float(bound) for bound in torch.aminmax(tensor))
        value = max(-low, high)
        if not value < END_OF_FP16:  # NaN too: look again at what is neither that nor the end
            magnitudes = tensor.abs()
            value = float(torch.where(magnitudes < END_OF_FP16, magnitudes, 0.0).amax())
        if value > self._largest.value:
            self._largest.value = value
            self._largest.module = self._running[-1] if self._running else ""
