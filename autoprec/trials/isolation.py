"""What a trial must not leave behind: random states, flags and memory are those of before."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from autoprec.trials.modes import Modes

__all__ = ["RandomState", "RandomStream", "isolated", "models_left", "modes_left", "seed_everything", "release"]


class RandomState:
    """The random states of Python, numpy, torch and the accelerator, at one moment."""

    def __init__(self) -> None:
        self._python = random.getstate()
        self._numpy = np.random.get_state()
        self._torch = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state_all() if _cuda_is_live() else None

    def restore(self) -> None:
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        torch.set_rng_state(self._torch)
        if self._cuda is not None:
            torch.cuda.set_rng_state_all(self._cuda)


class RandomStream:
    """A random state of its own, in force inside `with stream:`: what the model draws does not move the data."""

    def __init__(self, seed: int) -> None:
        outer = RandomState()
        seed_everything(seed)
        self._inner = RandomState()
        outer.restore()

    def __enter__(self) -> None:
        self._outer = RandomState()
        self._inner.restore()

    def __exit__(self, *exception: object) -> None:
        self._inner = RandomState()
        self._outer.restore()


def seed_everything(seed: int) -> None:
    """Seed Python, numpy, torch and every accelerator device."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


@contextmanager
def isolated() -> Iterator[None]:
    """Give back random states, torch's switches, its current dtype and device, and the process's modes as they were."""
    modes = Modes()
    randomness = RandomState()
    switches = [(read, write, read()) for read, write in _SWITCHES]

    def put_back() -> None:
        for read, write, value in switches:
            if read() != value:  # writing one for the first time can load much of torch
                write(value)

    try:
        yield
    finally:
        put_back()  # before the modes: a default device is a function mode, too
        _LEFT_MODES.update(dict.fromkeys(modes.restore()))
        put_back()  # inference mode decides on gradients
        with contextlib.suppress(RuntimeError):  # of a device that does not answer any more
            randomness.restore()


_LEFT_MODES: dict[str, None] = {}


def modes_left() -> list[str]:
    """Return the modes that code run in `isolated` has left in this process since the last call."""
    found = list(_LEFT_MODES)
    _LEFT_MODES.clear()
    return found


_LEFT: list[weakref.ref[nn.Module]] = []


def release(model: weakref.ref[nn.Module] | None, device: torch.device) -> None:
    """See to it that a dropped model is really gone: collect reference cycles only where some still hold it.

    One that lives on (the task's code holds it) is counted by `models_left`.
    """
    if model is not None and model() is not None:
        gc.collect()
    if device.type == "cuda":
        gc.collect()
        with contextlib.suppress(RuntimeError):  # a device that does not answer is found by whoever uses it next
            torch.cuda.empty_cache()
    _LEFT[:] = [each for each in (*_LEFT, model) if each is not None and each() is not None]


def models_left() -> int:
    """Return how many models of trials that are over are still alive in this process."""
    return sum(each() is not None for each in _LEFT)


def _cuda_is_live() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]


def _attribute(holder: Any, name: str) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    return (lambda: getattr(holder, name), lambda value: setattr(holder, name, value))


def _set_deterministic(state: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(state[0], warn_only=state[1])


def _working_folder() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:  # somebody removed it
        return "."


def _set_environment(values: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(values)


def _set_grad(enabled: bool) -> None:
    torch.set_grad_enabled(enabled)


def _set_anomaly(enabled: bool) -> None:
    torch.autograd.set_detect_anomaly(enabled)


def _autocast(device: str) -> Iterator[tuple[Callable[[], Any], Callable[[Any], None]]]:
    yield (lambda: torch.is_autocast_enabled(device), lambda on: torch.set_autocast_enabled(device, on))
    yield (lambda: torch.get_autocast_dtype(device), lambda dtype: torch.set_autocast_dtype(device, dtype))


def _own_default_device() -> torch.device | None:
    """Return the device that was set as the default; None where none was (setting any slows every call)."""
    mode = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    return None if mode is None else mode.device


_SWITCHES: tuple[tuple[Callable[[], Any], Callable[[Any], None]], ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (_own_default_device, torch.set_default_device),
    *_autocast("cpu"),
    *_autocast("cuda"),
    (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
    _attribute(torch.backends.cudnn, "enabled"),
    _attribute(torch.backends.mkldnn, "enabled"),
    _attribute(torch.utils.deterministic, "fill_uninitialized_memory"),
    _attribute(torch.backends.cuda.matmul, "allow_fp16_reduced_precision_reduction"),
    _attribute(torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction"),
    (torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp),
    (torch.backends.cuda.mem_efficient_sdp_enabled, torch.backends.cuda.enable_mem_efficient_sdp),
    (torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp),
    (torch.backends.cuda.cudnn_sdp_enabled, torch.backends.cuda.enable_cudnn_sdp),
    (_working_folder, os.chdir),
    (lambda: dict(os.environ), _set_environment),
    (torch.is_grad_enabled, _set_grad),
    (torch.get_num_threads, torch.set_num_threads),
    (
        lambda: (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        _set_deterministic,
    ),
    (torch.is_anomaly_enabled, _set_anomaly),
    (torch.backends.mha.get_fastpath_enabled, torch.backends.mha.set_fastpath_enabled),
    _attribute(torch.backends.cudnn, "benchmark"),
    _attribute(torch.backends.cudnn, "deterministic"),
    _attribute(torch.backends, "fp32_precision"),
    _attribute(torch.backends.mkldnn.matmul, "fp32_precision"),  # type: ignore[attr-defined]
    _attribute(torch.backends.mkldnn.conv, "fp32_precision"),  # type: ignore[attr-defined]
    _attribute(torch.backends.mkldnn.rnn, "fp32_precision"),  # type: ignore[attr-defined]
    _attribute(torch.backends.cuda.matmul, "fp32_precision"),
    _attribute(
        torch.backends.cudnn.conv,  # type: ignore[attr-defined]
        "fp32_precision",
    ),
    _attribute(
        torch.backends.cudnn.rnn,
        "fp32_precision",
    ),
)
