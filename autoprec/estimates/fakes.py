"""A model and a batch as fake tensors: same shapes, strides and dtypes, no memory; the originals are not touched."""

from __future__ import annotations

import copy
import functools
import logging
import random
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn import functional as F

from autoprec.errors import TaskError
from autoprec.tasks.batches import map_tensors

__all__ = [
    "fake_mode",
    "fake_copy",
    "fake_batch",
    "untouched_randomness",
    "causal_masks",
    "copy_closures",
    "cuda_attention",
    "loss_of_fakes",
    "quiet_fakes",
    "show_recurrent_gates",
]


def fake_mode() -> FakeTensorMode:
    """Return a mode in which operators work on shapes alone; a real tensor that a model holds on the side is lifted."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def fake_copy(model: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """Return a deep copy of `model` whose parameters, buffers and plain tensor attributes are fake CPU tensors.

    Raises:
        NotImplementedError: a part of the model is scripted: such a part has no fake copy.
        TaskError: the model cannot be deep-copied, or is lazy and was never run.
    """
    memo: dict[int, Any] = {}
    for module in model.modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise NotImplementedError("a scripted module has no fake copy")
        held = [*module._parameters.values(), *module._buffers.values(), *vars(module).values()]
        for tensor in held:
            if torch.nn.parameter.is_lazy(tensor):
                raise TaskError(f"{type(module).__name__}: its parameters have no shape yet; run the model once first")
            if isinstance(tensor, torch.Tensor) and id(tensor) not in memo:
                memo[id(tensor)] = _fake(tensor, mode)
    try:
        copied = copy.deepcopy(model, memo)
        copy_closures(model, memo)
        return copied
    except (TypeError, RuntimeError, NotImplementedError) as error:
        raise TaskError(f"{type(model).__name__}: cannot be deep-copied ({error})") from error


def copy_closures(model: nn.Module, memo: dict[int, Any]) -> None:
    """Give the copy of `model` its own functions over its own layers; `memo` is that of the deep copy.

    `copy.deepcopy` hands functions on as they are: a lambda in an attribute that closes over layers would go on calling
    the original's, whose parameters the copy never trains.
    """
    for module in model.modules():
        own = vars(memo[id(module)])
        for name, value in vars(module).items():
            if isinstance(value, types.FunctionType) and value.__closure__:
                cells = tuple(types.CellType(_in_copy(cell, memo)) for cell in value.__closure__)
                own[name] = types.FunctionType(
                    value.__code__, value.__globals__, value.__name__, value.__defaults__, cells
                )
                own[name].__kwdefaults__ = value.__kwdefaults__


def _in_copy(cell: types.CellType, memo: dict[int, Any]) -> Any:
    """Return what stands for a cell's content in the copy: modules, tensors and containers; else the content."""
    content = cell.cell_contents
    if isinstance(content, nn.Module | torch.Tensor | list | tuple | dict):
        return copy.deepcopy(content, memo)
    return content


def fake_batch(batch: Any, mode: FakeTensorMode) -> Any:
    """Return the batch with fake CPU tensors."""
    return map_tensors(lambda tensor: _fake(tensor, mode), batch)


def loss_of_fakes(model: nn.Module, batch: Any, loss: Callable[[nn.Module, Any], Any]) -> Any:
    """Call `loss(model, batch)` on fake copies of both: shapes are checked, nothing is computed or changed.

    Raises:
        Whatever the model raises, and what fake tensors cannot do.
    """
    mode = fake_mode()
    copied, made = fake_copy(model, mode), fake_batch(batch, mode)
    with untouched_randomness(), quiet_fakes(), mode:
        return loss(copied, made)


@contextmanager
def quiet_fakes() -> Iterator[None]:
    """Keep torch from logging why an operator failed under fake tensors: the error itself is raised."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    disabled, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = disabled


def _fake(tensor: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    fake: torch.Tensor = mode.from_tensor(tensor)
    if fake.device.type == "cpu":
        return fake
    with torch.no_grad(), mode:
        moved = fake.to("cpu")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(moved, requires_grad=tensor.requires_grad)
    return moved.requires_grad_(tensor.requires_grad)


@contextmanager
def untouched_randomness() -> Iterator[None]:
    """Give the random states of Python, NumPy (where loaded) and torch's CPU generator back at the end."""
    state, numpy = random.getstate(), sys.modules.get("numpy")
    numpy_state = None if numpy is None else numpy.random.get_state()
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            random.setstate(state)
            if numpy is not None:
                numpy.random.set_state(numpy_state)


@contextmanager
def cuda_attention() -> Iterator[None]:
    """Let `scaled_dot_product_attention` be planned without dropout, for the length of the context.

    CUDA's fused attention draws dropout inside the kernel and keeps no mask; the CPU has a fused kernel only without
    dropout and would be charged for the whole matrix of probabilities. Process-wide: not for real training.
    """
    original: Callable[..., torch.Tensor] = F.scaled_dot_product_attention

    def without_dropout(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        return original(query, key, value, attn_mask, 0.0, *args, **kwargs)

    F.scaled_dot_product_attention = without_dropout
    try:
        yield
    finally:
        F.scaled_dot_product_attention = original


@contextmanager
def causal_masks() -> Iterator[None]:
    """Let torch's transformer layers take a square fake mask as causal: they look at its values, which it has not.

    Process-wide, for the length of the context; masks with values are looked at as ever.
    """
    module: Any = torch.nn.modules.transformer
    original = module._detect_is_causal_mask

    def detect(mask: torch.Tensor | None, is_causal: bool | None = None, size: int | None = None) -> bool:
        if is_causal is None and isinstance(mask, FakeTensor):
            return mask.shape[-1] == mask.shape[-2] == (mask.shape[-2] if size is None else size)
        return bool(original(mask, is_causal, size))

    module._detect_is_causal_mask = detect
    try:
        yield
    finally:
        module._detect_is_causal_mask = original


def show_recurrent_gates(model: nn.Module) -> None:
    """Keep oneDNN out of the recurrent layers of a fake copy: what its fused LSTM saves stays hidden from fake tensors.

    The gates are then recorded step by step, as they are in half precision. Everything else keeps oneDNN, whose
    convolutions hand channels-last on as cuDNN's do.
    """
    switch: Callable[..., Any] = torch.backends.mkldnn.set_flags
    enabled = switch(_fp32_precision=None)[0]

    def turn(on: bool, *_: Any) -> None:
        switch(_enabled=on, _fp32_precision=None)

    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            module.register_forward_pre_hook(functools.partial(turn, False))
            module.register_forward_hook(functools.partial(turn, enabled), always_call=True)
