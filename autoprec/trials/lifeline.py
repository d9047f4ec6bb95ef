"""Processes that the system ends with their parent, however that ends."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Iterator

__all__ = ["as_parent", "end_with_parent", "follow_parent", "loading"]

PARENT = "AUTOPREC_PARENT"
"""Environment variable: the process that starts another one, which may be gone before that can ask for its parent."""
PR_SET_PDEATHSIG = 1
"""From linux/prctl.h."""


def end_with_parent(number: int = signal.SIGKILL) -> None:
    """Let Linux send this process a signal when the thread ends that has started it; 0 takes that back."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, number)


def follow_parent() -> None:
    """End this process in good order when the one that started it, and said so, is gone."""
    parent = os.environ.pop(PARENT, None)
    if parent is not None:
        end_with_parent(signal.SIGTERM)
        if os.getppid() != int(parent):
            os._exit(1)


@contextlib.contextmanager
def as_parent() -> Iterator[None]:
    """Let a process that is started meanwhile, and follows its parent, know which that is."""
    os.environ[PARENT] = str(os.getpid())
    try:
        yield
    finally:
        del os.environ[PARENT]


@contextlib.contextmanager
def loading() -> Iterator[None]:
    """End this fork server with its parent while it loads: only afterwards does it look whether that is still there.

    The thread that has started it waits for its first process, and so for the end of this.
    """
    parent = int(os.environ.pop(PARENT, os.getppid()))
    end_with_parent()
    if os.getppid() != parent:
        os._exit(0)
    try:
        yield
    finally:
        end_with_parent(0)
