"""Training code that names CUDA, where there is none: its autocast and its grad scaler are the CPU's instead."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch

__all__ = ["cuda_names_on_cpu"]


@contextmanager
def cuda_names_on_cpu() -> Iterator[None]:
    """Let `torch.autocast("cuda")`, `GradScaler("cuda")` and their older spellings work on the CPU inside the block.

    Without CUDA both only warn and switch themselves off, so that FP32 would be looked at. autocast's default dtype is
    CUDA's, FP16. Where CUDA is there nothing changes. Process-wide: not for real training.
    """
    if torch.cuda.is_available():
        yield
        return
    autocast, scaler = torch.autocast, torch.amp.GradScaler
    before = autocast.__init__, scaler.__init__
    autocast.__init__ = _of_autocast(autocast.__init__)  # type: ignore[method-assign]
    scaler.__init__ = _of_scaler(scaler.__init__)  # type: ignore[method-assign]
    try:
        yield
    finally:
        autocast.__init__, scaler.__init__ = before  # type: ignore[method-assign]


def _of_autocast(original: Callable[..., None]) -> Callable[..., None]:
    @wraps(original)
    def init(self: Any, device_type: str, dtype: torch.dtype | None = None, *args: Any, **kwargs: Any) -> None:
        if device_type == "cuda":
            device_type, dtype = "cpu", dtype or torch.get_autocast_dtype("cuda")
        original(self, device_type, dtype, *args, **kwargs)

    return init


def _of_scaler(original: Callable[..., None]) -> Callable[..., None]:
    @wraps(original)
    def init(self: Any, device: str = "cuda", *args: Any, **kwargs: Any) -> None:
        original(self, "cpu" if torch.device(device).type == "cuda" else device, *args, **kwargs)

    return init
