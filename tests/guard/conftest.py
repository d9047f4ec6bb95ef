"""What a guard changes of the whole process must not outlive it, closed or not."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def compiles_afterwards() -> Iterator[None]:
    """Let each test begin and end with torch.compile compiling."""
    yield
    if "torch._dynamo" in sys.modules:
        from torch._dynamo import eval_frame

        gc.collect()
        assert eval_frame._stance.stance == "default"
