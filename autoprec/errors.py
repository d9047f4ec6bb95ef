"""Errors and warnings of autoprec: each says where, what was found, what is allowed and the nearest name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = [
    "AutoprecError",
    "PolicyError",
    "ApplyError",
    "TaskError",
    "StudyError",
    "UsageError",
    "PrecisionWarning",
    "did_you_mean",
    "in_one_line",
]


class AutoprecError(Exception):
    """Base of every error that autoprec raises on purpose. `exit_code` is what the command line returns."""

    exit_code = 1


class PolicyError(AutoprecError, ValueError):
    """A policy file or value that is not a policy."""

    exit_code = 2


class ApplyError(AutoprecError, ValueError):
    """A policy that does not fit this model, device or torch; the model is left as it was."""

    exit_code = 4


class TaskError(AutoprecError, ValueError):
    """A task (model, data, loss, metric, optimizer) that cannot be trained as it is described."""

    exit_code = 2


class StudyError(AutoprecError):
    """A study that cannot be opened, continued or used."""


class UsageError(AutoprecError, ValueError):
    """A setting that a person gave and that cannot be followed."""

    exit_code = 2


class PrecisionWarning(UserWarning):
    """Something is allowed but probably not what was meant (slow on this device, other shapes, other torch)."""


def in_one_line(name: object, *, max_characters: int = 80) -> str:
    """Return a name from a file as a message can hold it: cut, and line breaks and the like written out."""
    text = str(name)[:max_characters]
    return text if text.isprintable() else text.encode("unicode_escape").decode()


def did_you_mean(name: str, allowed: Iterable[str], *, count: int = 3) -> str:
    """Return "; nearest: a, b" for the allowed names closest to `name`, or "" where none is close."""
    close = difflib.get_close_matches(name, list(allowed), n=count, cutoff=0.5)
    return f"; nearest: {', '.join(close)}" if close else ""
