"""What the program says beside its results: the logger `autoprec` and Python's warnings, one line each on stderr."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["is_quiet", "logging_to_stderr"]


def is_quiet() -> bool:
    """Whether neither progress nor warnings are wanted (`-q`)."""
    return not logging.getLogger("autoprec").isEnabledFor(logging.WARNING)


@contextmanager
def logging_to_stderr() -> Iterator[logging.Logger]:
    """Send the logger `autoprec`, and warnings as a part of it, to stderr inside the block; yield the logger."""
    log = logging.getLogger("autoprec")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_OneLine())
    level, shown = log.level, warnings.showwarning

    def show(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
        log.warning("%s: %s", category.__name__, message)

    log.addHandler(handler)
    warnings.showwarning = show
    try:
        yield log
    finally:
        warnings.showwarning = shown
        log.removeHandler(handler)
        log.setLevel(level)


class _OneLine(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        from autoprec.report.escaping import printable

        return printable(f"{record.levelname.lower()}: {record.getMessage()}").replace("\n", " ")
