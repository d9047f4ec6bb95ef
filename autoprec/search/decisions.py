"""Turn a model's units and a search space into decisions: which units share one precision, and what it may be."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from autoprec.errors import UsageError, did_you_mean
from autoprec.policy import Precision, lies_in
from autoprec.search.decision import CONTAINERS, Decision
from autoprec.search.names import parent_of, prefixes_of
from autoprec.search.repeats import share_repeats, unique_names
from autoprec.search.space import Rule, SearchSpace, matches_any

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
    if space.granularity == "type":
        decisions = _by_type(singles)
    else:
        decisions = _group(singles, space, tree, model, composites or {})
        decisions = share_repeats(decisions, model) if space.repeats == "together" else decisions
    decisions = _join_tied(decisions, units, tree)
    return _with_depth(decisions, [single.name for single in singles])


def _group(
    singles: list[Decision], space: SearchSpace, tree: Mapping[str, str], model: nn.Module, composites: Composites
) -> list[Decision]:
    if space.granularity == "leaf":
        return _join_followers(singles, space)
    names = _block_names(model) if space.granularity == "block" else _stage_names(model)
    return _into_modules(singles, names, tree, composites)


def _with_depth(decisions: list[Decision], call_order: list[str]) -> list[Decision]:
    places: dict[str, list[int]] = {}
    for place, name in enumerate(call_order):
        for prefix in prefixes_of(name):
            places.setdefault(prefix, []).append(place)
    last = max(1, len(call_order) - 1)

    def depth(decision: Decision) -> float:
        mean = [place for name in decision.units for place in places.get(name, ())]
        return sum(mean) / len(mean) / last

    return [replace(decision, depth=depth(decision)) for decision in decisions]


def _single(unit: UnitLike, space: SearchSpace) -> Decision:
    refused = _with_half(unit.reasons)
    has_half = "half" not in refused and not {"fp16", "bf16"}.isdisjoint(unit.choices)
    available: set[str] = {*unit.choices, *(("half",) if has_half else ())}
    choices = tuple(choice for choice in space.choices if choice in available)
    reasons: dict[str, str] = {p: refused[p] for p in space.choices if p in refused}
    return Decision(unit.name, {unit.name: unit.type}, choices or ("fp32",), reasons)


def _with_half(refused: Mapping[Precision, str]) -> dict[str, str]:
    """Add why `half`, which may be either dtype, is refused: where one of the two is."""
    known: dict[str, str] = dict(refused.items())
    either = refused.get("fp16") or refused.get("bf16")
    return known if either is None else {**known, "half": either}


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
        singles = [_restrict(d, rule, space) if d.name in names else d for d in singles]
    return singles


def _restrict(decision: Decision, rule: Rule, space: SearchSpace) -> Decision:
    allowed = rule.choices or decision.choices
    left = tuple(choice for choice in decision.choices if choice in allowed)
    if not left:
        raise UsageError(
            f"search space {space.name}: a rule allows {', '.join(allowed)} for {decision.name}, "
            f"which can only be {', '.join(decision.choices)}"
        )
    dropped: dict[str, str] = {choice: rule.reason for choice in decision.choices if choice not in left}
    reasons = {**decision.reasons, **dropped}
    return replace(decision, choices=left, reasons=reasons, start=rule.start or decision.start)


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


def _join_tied(decisions: list[Decision], units: Sequence[UnitLike], tree: Mapping[str, str]) -> list[Decision]:
    """Merge the decisions of units that share a weight; choices that one of them lacks are lost to all.

    A layer that holds the weight and is never called goes with them: the weight takes one precision.
    """
    for unit in units:
        if not unit.tied:
            continue
        wanted = {unit.name, *unit.tied}
        joined = [decision for decision in decisions if any(_governs(decision, name) for name in wanted)]
        idle = {name: tree[name] for name in unit.tied if not any(_governs(known, name) for known in decisions)}
        if len(joined) < 2 and not idle:
            continue
        first = replace(joined[0], units={**joined[0].units, **idle})
        for other in joined[1:]:
            choices = tuple(choice for choice in first.choices if choice in other.choices)
            merged = {**first.units, **other.units}
            first = replace(
                first, units=merged, choices=choices or ("fp32",), reasons={**first.reasons, **other.reasons}
            )
        decisions = [first if d is joined[0] else d for d in decisions if d is joined[0] or d not in joined]
    return decisions


def _governs(decision: Decision, unit: str) -> bool:
    return any(lies_in(unit, name) for name in decision.units)


def _by_type(singles: list[Decision]) -> list[Decision]:
    """Merge the units of one class that have the same choices; a pinned unit keeps its own decision."""
    merged: dict[tuple[object, ...], Decision] = {}
    for single in singles:
        if single.is_pinned:
            merged[(single.name,)] = single
            continue
        key = (single.lead_type, single.choices, single.start)
        known = merged.get(key, replace(single, name=single.lead_type, units={}))
        units, reasons = {**known.units, **single.units}, {**known.reasons, **single.reasons}
        merged[key] = replace(known, units=units, reasons=reasons)
    return unique_names(list(merged.values()))


def _into_modules(
    singles: list[Decision], names: set[str], tree: Mapping[str, str], composites: Composites
) -> list[Decision]:
    """Merge the units of each module of `names`; a pinned unit inside one keeps its own decision.

    What the code between the units cannot run in is no choice for the module.
    """
    merged: dict[str, Decision] = {}
    for single in singles:
        module = next((name for name in prefixes_of(single.name)[:-1] if name in names), single.name)
        if single.is_pinned or module == single.name:
            merged[single.name] = single
            continue
        if module not in merged:
            inside = [refused for name, refused in composites.items() if lies_in(name, module)]
            refused = {p: reason for reasons in inside for p, reason in _with_half(reasons).items()}
            choices = tuple(choice for choice in single.choices if choice not in refused) or ("fp32",)
            merged[module] = Decision(module, {module: tree[module]}, choices, refused, start=single.start)
        known = merged[module]
        choices = tuple(choice for choice in known.choices if choice in single.choices)
        start = known.start if known.start == single.start else None
        merged[module] = replace(known, choices=choices, reasons={**known.reasons, **single.reasons}, start=start)
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


def _stage_names(model: nn.Module) -> set[str]:
    """Names of the innermost containers that hold a run of blocks of one class: `layer1`, `encoder.layers`."""
    holding = [name for name, module in model.named_modules() if name and _holds_blocks(module)]
    return {name for name in holding if not any(other.startswith(f"{name}.") for other in holding)}


def _is_container(module: nn.Module) -> bool:
    return type(module).__name__ in CONTAINERS


def _holds_blocks(module: nn.Module) -> bool:
    """Whether a Sequential or list holds two composites of one class that is not a container itself."""
    from torch import nn

    if not isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict):
        return False
    kinds = [type(child) for child in module.children() if list(child.children()) and not _is_container(child)]
    return len(kinds) != len(set(kinds))
