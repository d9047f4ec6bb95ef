"""One decision of a search: the units that share a precision, and what it may be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from autoprec.search.space import Choice

__all__ = ["Decision", "CONTAINERS"]

CONTAINERS = ("Sequential", "ModuleList", "ModuleDict")
"""Class names of modules that only hold others."""


@dataclass(frozen=True, slots=True)
class Decision:
    """One precision to decide. `units` maps the module names that share it to their class names, in call order.

    `reasons` says for each precision that is not offered why; with a single choice the decision is pinned. `depth` is
    where its units are called on average: 0 the first unit of the model, 1 the last. `start` is what practice runs it
    in, where the search space says so.
    """

    name: str
    units: Mapping[str, str]
    choices: tuple[Choice, ...]
    reasons: Mapping[str, str] = field(default_factory=dict)
    depth: float = 0.0
    start: Choice | None = None

    @property
    def parameter(self) -> str:
        return f"precision/{self.name}"

    @property
    def lead_type(self) -> str:
        return next(iter(self.units.values()))

    @property
    def is_pinned(self) -> bool:
        return len(self.choices) == 1
