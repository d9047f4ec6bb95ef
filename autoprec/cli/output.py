"""The choice between text and JSON; loads nothing heavy."""

from __future__ import annotations

from autoprec.errors import UsageError, did_you_mean

__all__ = ["FORMATS", "check_format"]

FORMATS = ("text", "json")


def check_format(name: str) -> None:
    """Raise UsageError for an output format that does not exist."""
    if name not in FORMATS:
        raise UsageError(f"format {name!r}; allowed: {', '.join(FORMATS)}{did_you_mean(name, FORMATS)}")
