"""Ctrl-C and its kin: the first asks the command to end in good order, the second ends it at once."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

from autoprec.cli.output import INTERRUPTED

__all__ = ["interruptible"]

SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
"""From a person, from a job system, from a terminal that was closed."""


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Let the first of these signals raise KeyboardInterrupt and the second end the process with exit code 130.

    The worker processes end with this one in either case. A signal that is ignored (as under nohup) stays so.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in SIGNALS}
    taken = [number for number, handler in before.items() if handler not in (signal.SIG_IGN, None)]

    def end(number: int, frame: FrameType | None) -> None:
        os._exit(INTERRUPTED)

    def interrupt(number: int, frame: FrameType | None) -> None:
        for each in taken:
            signal.signal(each, end)
        raise KeyboardInterrupt

    for each in taken:
        signal.signal(each, interrupt)
    try:
        yield
    finally:
        for each in taken:
            signal.signal(each, before[each])
