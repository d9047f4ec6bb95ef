"""The choice between text and JSON, and the console that text goes to; loads nothing heavy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autoprec.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["FORMATS", "check_format", "open_console"]

FORMATS = ("text", "json")
PLAIN_WIDTH = 120
"""Width of tables where the output is not a terminal."""


def check_format(name: str) -> None:
    """Raise UsageError for an output format that does not exist."""
    if name not in FORMATS:
        raise UsageError(f"format {name!r}; allowed: {', '.join(FORMATS)}{did_you_mean(name, FORMATS)}")


def open_console(*, to_stderr: bool = False) -> Console:
    """Return a console that colours nothing by itself."""
    from rich.console import Console

    console = Console(stderr=to_stderr, highlight=False, emoji=False)
    if not console.is_terminal:
        console = Console(stderr=to_stderr, highlight=False, emoji=False, width=PLAIN_WIDTH)
    return console
