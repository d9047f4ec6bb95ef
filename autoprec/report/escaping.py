"""Text from files and models, made harmless for a terminal: names cannot style it, move in it or hide in it."""

from __future__ import annotations

__all__ = ["escaped", "printable"]


def printable(text: str) -> str:
    """Return the text with control, bidirectional and other unprintable characters written out (`\\x1b`)."""
    return "".join(c if c in "\n\u00a0" or c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def escaped(text: str) -> str:
    """Return the text so that rich prints it as it stands: `[red]` is no markup."""
    from rich.markup import escape

    return escape(printable(text))
