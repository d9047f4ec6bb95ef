"""Searches that end with the test that started them."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
from searches import Start, start_search


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a search on an engine, which ends with the test."""
    with contextlib.ExitStack() as stack:

        def begin(*given: Any, **more: Any) -> subprocess.Popen[str]:
            search = stack.enter_context(start_search(*given, **more))
            stack.callback(search.kill)
            return search

        yield begin
