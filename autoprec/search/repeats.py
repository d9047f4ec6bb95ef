"""Let repeated blocks share their decisions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from autoprec.policy import Precision
from autoprec.search.decision import CONTAINERS, Decision
from autoprec.search.names import is_numbered, last_part, parent_of, prefixes_of, run_label

__all__ = ["share_repeats"]


def share_repeats(decisions: list[Decision], tree: Mapping[str, str]) -> list[Decision]:
    """Merge the decisions of sibling blocks that have the same class and the same decisions inside."""
    labels = _labels(decisions, tree)
    shared: dict[tuple[str, tuple[Precision, ...]], Decision] = {}
    for decision in decisions:
        name = ".".join(labels[prefix] for prefix in prefixes_of(decision.name))
        key = (name, decision.choices)
        known = shared.get(key)
        units = {**known.units, **decision.units} if known else decision.units
        reasons = {**known.reasons, **decision.reasons} if known else decision.reasons
        shared[key] = Decision(name, units, decision.choices, reasons)
    return _unique_names(list(shared.values()))


def _unique_names(decisions: list[Decision]) -> list[Decision]:
    names = [decision.name for decision in decisions]
    return [replace(d, name=next(iter(d.units))) if names.count(d.name) > 1 else d for d in decisions]


def _labels(decisions: list[Decision], tree: Mapping[str, str]) -> dict[str, str]:
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
        return (tree.get(name, ""), own.get(name), inside)

    blocks = {parent_of(name) for name in tree if tree.get(parent_of(name)) not in CONTAINERS}
    labels: dict[str, str] = {}
    for siblings in children.values():
        runs: dict[tuple[object, ...], list[str]] = {}
        for sibling in siblings:
            repeats = is_numbered(sibling) and sibling in blocks
            runs.setdefault(signature(sibling) if repeats else (sibling,), []).append(sibling)
        for run in runs.values():
            labels.update(dict.fromkeys(run, run_label([last_part(name) for name in run])))
    return labels
