"""Switch off the fused inference paths of torch's transformer layers, which skip their children's own forwards."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

__all__ = ["WITHOUT_FASTPATH"]


class _WithoutFastpath:
    """A re-entrant context for all threads; the setting comes back when the last user leaves."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_users = 0
        self._before = True

    def enter(self) -> None:
        with self._lock:
            if self._num_users == 0:
                self._before = torch.backends.mha.get_fastpath_enabled()
                torch.backends.mha.set_fastpath_enabled(False)
            self._num_users += 1

    def leave(self) -> None:
        with self._lock:
            self._num_users -= 1
            if self._num_users == 0:
                torch.backends.mha.set_fastpath_enabled(self._before)


_USERS = _WithoutFastpath()


def _constant(function: Callable[[], int]) -> Callable[[], int]:
    """Do what `torch.compiler.assume_constant_result` does, without importing the compiler, which takes seconds."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


# The compiler reads the setting once, while it traces, so it has to be off in that moment and not in the graph.
@_constant
def _enter() -> int:
    _USERS.enter()
    return 0


@_constant
def _leave() -> int:
    _USERS.leave()
    return 0


class _Context:
    __slots__ = ()

    def __enter__(self) -> None:
        _enter()

    def __exit__(self, *exception: object) -> None:
        _leave()


WITHOUT_FASTPATH = _Context()
