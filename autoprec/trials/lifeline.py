"""A fork server that loads for seconds ends with the search that has started it, even where that ends at once."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

__all__ = ["as_parent", "ending_with_parent"]

PARENT = "AUTOPREC_PARENT"
"""Environment variable: the process that starts a fork server, which may be gone before that can ask for its parent."""
WATCH_SECONDS = 0.1


@contextlib.contextmanager
def as_parent() -> Iterator[None]:
    """Let a fork server that is started meanwhile know whose child it is."""
    os.environ[PARENT] = str(os.getpid())
    try:
        yield
    finally:
        del os.environ[PARENT]


@contextlib.contextmanager
def ending_with_parent() -> Iterator[None]:
    """End this process, a fork server, when its parent is gone: it sees that for itself only when it has loaded all."""
    parent = int(os.environ.pop(PARENT, os.getppid()))
    is_loaded = threading.Event()

    def watch() -> None:
        while os.getppid() == parent:
            if is_loaded.wait(WATCH_SECONDS):
                return
        os._exit(0)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        is_loaded.set()
        watcher.join()  # no thread of ours is there when the server forks
