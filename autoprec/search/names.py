"""Module names as paths: parents, prefixes, and the short name of a run of repeated blocks."""

from __future__ import annotations

import re

__all__ = ["last_part", "parent_of", "prefixes_of", "is_numbered", "run_label"]


def last_part(name: str) -> str:
    return name.rpartition(".")[2]


def parent_of(name: str) -> str:
    return name.rpartition(".")[0]


def prefixes_of(name: str) -> list[str]:
    """Return the names from the outermost module down to `name` itself: `a`, `a.b`, `a.b.c`."""
    parts = name.split(".")
    return [".".join(parts[: i + 1]) for i in range(len(parts))]


def is_numbered(name: str) -> bool:
    return name[-1:].isdigit()


def run_label(names: list[str]) -> str:
    """Name a run of repeated blocks: `layer_0`, `layer_1`, `layer_2` -> `layer_0..2`; `1`, `3` -> `1,3`."""
    if len(names) == 1:
        return names[0]
    stems = {re.sub(r"\d+$", "", name) for name in names}
    numbers = sorted(int(re.sub(r"^.*?(\d+)$", r"\1", name)) for name in names)
    stem = stems.pop() if len(stems) == 1 else ""
    if numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"{stem}{numbers[0]}..{numbers[-1]}"
    return stem + ",".join(map(str, numbers))
