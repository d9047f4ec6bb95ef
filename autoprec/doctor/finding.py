"""One trouble as data, and how places and dtypes are called in it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["NUM_NAMES", "Finding", "dtype_name", "names_of", "place_of"]

NUM_NAMES = 4


@dataclass(frozen=True, slots=True)
class Finding:
    """One trouble.

    Attributes:
        name: what it is called, such as "overflow".
        unit: the module or parameter; "" is the model itself or the loop.
        seen: what was seen, with numbers.
        why: why it matters.
        change: what to change.
        is_wrong: True where training is in danger; False for what only costs memory or time.
    """

    name: str
    unit: str
    seen: str
    why: str
    change: str
    is_wrong: bool = True


def place_of(unit: str) -> str:
    """Return what a unit is called in a sentence."""
    return unit or "the model's own code or the loss"


def names_of(names: list[str]) -> str:
    """Return the first names, and how many more there are."""
    more = f" and {len(names) - NUM_NAMES} more" if len(names) > NUM_NAMES else ""
    return ", ".join(place_of(name) for name in names[:NUM_NAMES]) + more


def dtype_name(dtype: torch.dtype) -> str:
    """Return "float16" for `torch.float16`."""
    return str(dtype).removeprefix("torch.")
