"""Let repeated blocks share their decisions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

from autoprec.search.decision import CONTAINERS, Decision
from autoprec.search.names import is_numbered, last_part, parent_of, prefixes_of, run_label

if TYPE_CHECKING:
    from torch import nn

__all__ = ["share_repeats", "unique_names"]


def share_repeats(decisions: list[Decision], model: nn.Module) -> list[Decision]:
    """Merge the decisions of sibling blocks that have the same class, widths and decisions inside."""
    labels = _labels(decisions, {name: _Shape.of(module) for name, module in model.named_modules()})
    shared: dict[tuple[object, ...], Decision] = {}
    for decision in decisions:
        name = ".".join(labels[prefix] for prefix in prefixes_of(decision.name))
        key = (name, decision.choices, decision.start)
        known = shared.get(key)
        units = {**known.units, **decision.units} if known else decision.units
        reasons = {**known.reasons, **decision.reasons} if known else decision.reasons
        shared[key] = replace(decision, name=name, units=units, reasons=reasons)
    return unique_names(list(shared.values()))


@dataclass(frozen=True, slots=True)
class _Shape:
    """What two modules have in common where one repeats the other: the class, and the outputs of each weight.

    Inputs do not count: the layers of a DenseNet's block see ever more of them.
    """

    kind: str
    widths: tuple[int, ...]

    @classmethod
    def of(cls, module: nn.Module) -> Self:
        weights = [parameter for parameter in module.parameters(recurse=False) if parameter.dim() > 1]
        return cls(type(module).__name__, tuple(weight.shape[0] for weight in weights))


def unique_names(decisions: list[Decision]) -> list[Decision]:
    """Call the decisions that share a name by the first unit of each."""
    names = [decision.name for decision in decisions]
    return [replace(d, name=next(iter(d.units))) if names.count(d.name) > 1 else d for d in decisions]


def _labels(decisions: list[Decision], tree: Mapping[str, _Shape]) -> dict[str, str]:
    """Return for each module on the way to a decision the last part of its name, or that of its run of repeats."""
    children: dict[str, list[str]] = {}
    for decision in decisions:
        for prefix in prefixes_of(decision.name):
            siblings = children.setdefault(parent_of(prefix), [])
            if prefix not in siblings:
                siblings.append(prefix)
    own = {d.name: (tuple(d.units.values()), d.choices) for d in decisions}

    def signature(name: str) -> tuple[object, ...]:
        inside = tuple((last_part(child), signature(child)) for child in children.get(name, ()))
        return (tree.get(name), own.get(name), inside)

    containers = {name for name, shape in tree.items() if shape.kind in CONTAINERS}
    blocks = {parent_of(name) for name in tree} - containers
    labels: dict[str, str] = {}
    for siblings in children.values():
        runs: dict[tuple[object, ...], list[str]] = {}
        for sibling in siblings:
            repeats = is_numbered(sibling) and sibling in blocks
            runs.setdefault(signature(sibling) if repeats else (sibling,), []).append(sibling)
        for run in runs.values():
            labels.update(dict.fromkeys(run, run_label([last_part(name) for name in run])))
    return labels
