"""Turn a model's units and a search space into decisions: which units share one precision, and what it may be."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from autoprec.errors import UsageError, did_you_mean
from autoprec.policy import Precision
from autoprec.search.decision import CONTAINERS, Decision
from autoprec.search.names import parent_of, prefixes_of
from autoprec.search.repeats import share_repeats
from autoprec.search.space import SearchSpace, matches_any

if TYPE_CHECKING:
    from torch import nn

__all__ = ["UnitLike", "build_decisions"]


class UnitLike(Protocol):
    """What a decision needs to know of a unit."""

    @property
    def name(self) -> str: ...
    @property
    def type(self) -> str: ...
    @property
    def choices(self) -> Sequence[Precision]: ...
    @property
    def reasons(self) -> Mapping[Precision, str]: ...
    @property
    def tied(self) -> Sequence[str]: ...


Composites = Mapping[str, Mapping[Precision, str]]
"""Modules above the units -> why their own code cannot run in some precision."""


def build_decisions(
    units: Iterable[UnitLike], space: SearchSpace, model: nn.Module, *, composites: Composites | None = None
) -> list[Decision]:
    """Return the decisions in call order. `units` come in call order; the model is only read for its structure.

    Raises:
        UsageError: a rule of the space matches no unit, or leaves a unit without a choice.
    """
    tree = {name: type(module).__name__ for name, module in model.named_modules()}
    units = list(units)
    singles = _apply_rules([_single(unit, space) for unit in units], space)
    if space.granularity == "block":
        decisions = _into_blocks(singles, tree, model, composites or {})
    else:
        decisions = _join_followers(singles, space)
    decisions = share_repeats(decisions, tree) if space.repeats == "together" else decisions
    decisions = _join_tied(decisions, units)
    return _with_depth(decisions, [single.name for single in singles])


def _with_depth(decisions: list[Decision], call_order: list[str]) -> list[Decision]:
    places: dict[str, list[int]] = {}
    for place, name in enumerate(call_order):
        for prefix in prefixes_of(name):
            places.setdefault(prefix, []).append(place)
    last = max(1, len(call_order) - 1)

    def depth(decision: Decision) -> float:
        mean = [place for name in decision.units for place in places[name]]
        return sum(mean) / len(mean) / last

    return [replace(decision, depth=depth(decision)) for decision in decisions]


def _single(unit: UnitLike, space: SearchSpace) -> Decision:
    choices = tuple(choice for choice in space.choices if choice in unit.choices)
    reasons: dict[str, str] = {p: r for p, r in unit.reasons.items() if p in space.choices and p not in choices}
    return Decision(unit.name, {unit.name: unit.type}, choices or ("fp32",), reasons)


def _apply_rules(singles: list[Decision], space: SearchSpace) -> list[Decision]:
    for rule in space.rules:
        matched = [d for d in singles if rule.matches(d.name, d.lead_type)]
        if not matched and not rule.optional:
            wanted = [*rule.names, *rule.types]
            known = [d.name for d in singles] + sorted({d.lead_type for d in singles})
            raise UsageError(
                f"search space {space.name}: the rule for {', '.join(wanted)} matches no unit of the model"
                + did_you_mean(wanted[0], known)
            )
        names = {d.name for d in matched}
        singles = [_restrict(d, rule.choices, rule.reason, space) if d.name in names else d for d in singles]
    return singles


def _restrict(decision: Decision, choices: Sequence[Precision], reason: str, space: SearchSpace) -> Decision:
    left = tuple(choice for choice in decision.choices if choice in choices)
    if not left:
        raise UsageError(
            f"search space {space.name}: a rule allows {', '.join(choices)} for {decision.name}, "
            f"which can only be {', '.join(decision.choices)}"
        )
    dropped: dict[str, str] = {choice: reason for choice in decision.choices if choice not in left}
    return replace(decision, choices=left, reasons={**decision.reasons, **dropped})


def _join_followers(singles: list[Decision], space: SearchSpace) -> list[Decision]:
    """Let each unit of a follower type join the unit called just before it in the same parent."""
    groups: list[Decision] = []
    previous = ""
    for single in singles:
        follows = matches_any(single.lead_type, space.followers) and groups and parent_of(single.name) == previous
        if follows and single.choices == groups[-1].choices:
            groups[-1] = replace(groups[-1], units={**groups[-1].units, **single.units})
        else:
            groups.append(single)
        previous = parent_of(single.name)
    return groups


def _join_tied(decisions: list[Decision], units: Sequence[UnitLike]) -> list[Decision]:
    """Merge the decisions of units that share a weight; choices that one of them lacks are lost to all."""
    for unit in units:
        wanted = {unit.name, *unit.tied}
        joined = [decision for decision in decisions if wanted & set(decision.units)]
        if len(joined) < 2:
            continue
        first = joined[0]
        for other in joined[1:]:
            choices = tuple(choice for choice in first.choices if choice in other.choices)
            merged = {**first.units, **other.units}
            first = replace(
                first, units=merged, choices=choices or ("fp32",), reasons={**first.reasons, **other.reasons}
            )
        decisions = [first if d is joined[0] else d for d in decisions if d is joined[0] or d not in joined]
    return decisions


def _into_blocks(
    singles: list[Decision], tree: Mapping[str, str], model: nn.Module, composites: Composites
) -> list[Decision]:
    """Merge the units of each block; a pinned unit inside a block keeps its own decision.

    What the code between the units of a block cannot run in is no choice for the block.
    """
    blocks = _block_names(model)
    merged: dict[str, Decision] = {}
    for single in singles:
        block = next((name for name in prefixes_of(single.name)[:-1] if name in blocks), single.name)
        if single.is_pinned or block == single.name:
            merged[single.name] = single
            continue
        refused: dict[str, str] = {p: reason for p, reason in composites.get(block, {}).items()}  # noqa: C416
        known = merged.get(block, Decision(block, {block: tree[block]}, single.choices, refused))
        known = replace(known, choices=tuple(choice for choice in known.choices if choice not in refused) or ("fp32",))
        choices = tuple(choice for choice in known.choices if choice in single.choices)
        merged[block] = replace(known, choices=choices, reasons={**known.reasons, **single.reasons})
    return list(merged.values())


def _block_names(model: nn.Module) -> set[str]:
    """Names of the outermost composites that are neither containers nor hold a run of blocks of one class."""
    names: set[str] = set()

    def visit(name: str, module: nn.Module) -> None:
        for child_name, child in module.named_children():
            full = f"{name}.{child_name}" if name else child_name
            if not list(child.children()):
                continue
            if _is_container(child) or any(_holds_blocks(inner) for inner in child.modules()):
                visit(full, child)
            else:
                names.add(full)

    visit("", model)
    return names


def _is_container(module: nn.Module) -> bool:
    return type(module).__name__ in CONTAINERS


def _holds_blocks(module: nn.Module) -> bool:
    """Whether a Sequential or list holds two composites of one class that is not a container itself."""
    from torch import nn

    if not isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict):
        return False
    kinds = [type(child) for child in module.children() if list(child.children()) and not _is_container(child)]
    return len(kinds) != len(set(kinds))
