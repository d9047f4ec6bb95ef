"""The tests of this room run under the CPU emulation, as an FP16 policy is meant to be used on a CPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from autoprec import emulate


@pytest.fixture(autouse=True, scope="module")
def emulated(request: pytest.FixtureRequest) -> Iterator[None]:
    """Emulate for the whole module, unless it says `EMULATED = False`."""
    if getattr(request.module, "EMULATED", True):
        with emulate():
            yield
    else:
        yield
