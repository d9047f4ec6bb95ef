"""A GPU's low-precision arithmetic and autocast rules reproduced on a CPU. Knows tensors and callables, no policy."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from autoprec.emulation.arithmetic import HalfArithmetic
from autoprec.emulation.autocast import cuda_autocast_rules

__all__ = ["emulate", "is_emulating", "cuda_autocast_rules"]


class _Thread(threading.local):
    num_open = 0
    has_arithmetic = False


_thread = _Thread()


def is_emulating() -> bool:
    """Say whether this thread is inside `emulate()`."""
    return _thread.num_open > 0


@contextmanager
def _arithmetic() -> Iterator[None]:
    if _thread.has_arithmetic:
        yield
        return
    _thread.has_arithmetic = True
    try:
        with torch.compiler.set_stance("force_eager"), HalfArithmetic():
            yield
    finally:
        _thread.has_arithmetic = False


@contextmanager
def emulate(*, gpu_rules: bool = True, arithmetic: bool = True) -> Iterator[None]:
    """Reproduce a GPU's half precision on the CPU inside the context; contexts may be nested.

    `gpu_rules`: CPU autocast follows CUDA's operator lists, in every thread of the process.
    `arithmetic`: half products, convolutions and attention called by this thread are computed in FP32, rounded once.
    An inner context adds to an outer one and switches nothing off. Compiled models run eagerly meanwhile. Tensors of
    other devices, FP32 and FP64 are left alone.
    """
    with ExitStack() as stack:
        if gpu_rules:
            stack.enter_context(cuda_autocast_rules())
        if arithmetic:
            stack.enter_context(_arithmetic())
        _thread.num_open += 1
        stack.callback(_leave)
        yield


def _leave() -> None:
    _thread.num_open -= 1
