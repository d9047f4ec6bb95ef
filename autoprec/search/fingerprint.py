"""Identify a study by everything that decides its numbers, and name what differs between two."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from autoprec.errors import TaskError
from autoprec.policy import content_hash

__all__ = ["Identity", "study_identity", "first_difference", "versions"]

Identity = dict[str, Any]
"""Flat: dotted name -> JSON value."""


def versions() -> dict[str, str]:
    """Return the versions that may change a trial's numbers."""
    found: dict[str, str] = {}
    for name in ("autoprec", "torch", "optuna"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def study_identity(**parts: Any) -> Identity:
    """Flatten nested mappings to dotted names.

    Raises:
        TaskError: a value that is not JSON; its name is told.
    """
    flat: Identity = {}

    def visit(prefix: str, value: Any) -> None:
        if isinstance(value, Mapping) and value:
            for key, inner in value.items():
                visit(f"{prefix}.{key}" if prefix else str(key), inner)
        else:
            try:
                flat[prefix] = json.loads(json.dumps(value, allow_nan=False))
            except (TypeError, ValueError, OverflowError, RecursionError) as error:
                raise TaskError(
                    f"{prefix[:200]}: {type(value).__name__} is no JSON value ({str(error)[:200]}); finite numbers,"
                    " text, lists and mappings are, which a study can be told by"
                ) from None

    visit("", parts)
    return dict(sorted(flat.items()))


def identity_hash(identity: Identity) -> str:
    return content_hash(json.dumps(identity, sort_keys=True))[:10]


def first_difference(stored: Identity, given: Identity) -> str | None:
    """Return "name: stored, now given" for the first name that differs, None where the two are equal."""
    for name in sorted({*stored, *given}):
        if stored.get(name) != given.get(name):
            return f"{name} was {_shown(stored.get(name))}, now {_shown(given.get(name))}"
    return None


def _shown(value: Any) -> str:
    text = "absent" if value is None else json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."
