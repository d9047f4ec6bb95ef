"""What the tests of the emulation share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode


@contextmanager
def _real_cuda_autocast() -> Iterator[None]:
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", torch.float16)
    try:
        with FakeTensorMode(), torch.device("cuda"):
            yield
    finally:
        torch.set_autocast_enabled("cuda", before[0])
        torch.set_autocast_dtype("cuda", before[1])
        torch.clear_autocast_cache()


@pytest.fixture(scope="session")
def real_cuda_autocast() -> Callable[[], AbstractContextManager[None]]:
    """Give a context in which torch's own AutocastCUDA kernels run on fake CUDA tensors, which needs no GPU."""
    return _real_cuda_autocast
