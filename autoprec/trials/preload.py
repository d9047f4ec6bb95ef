"""Importing this loads what a worker process needs; a fork server does so once for all of them."""

from __future__ import annotations

import contextlib
import importlib
import os
import threading
from collections.abc import Iterator

__all__ = ["MODULES"]

MODULES = ("autoprec.estimates", "autoprec.tasks.vision", "autoprec.trials.runner", "autoprec.trials.child")
WATCH_SECONDS = 0.1


@contextlib.contextmanager
def _ending_with(parent: int) -> Iterator[None]:
    """End this process when its parent is gone: a fork server sees that for itself only when it has loaded all."""
    is_loaded = threading.Event()

    def watch() -> None:
        while not is_loaded.wait(WATCH_SECONDS):
            if os.getppid() != parent:
                os._exit(0)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        is_loaded.set()
        watcher.join()  # no thread of ours is there when the server forks


with _ending_with(os.getppid()):
    for name in MODULES:
        importlib.import_module(name)
