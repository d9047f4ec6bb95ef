"""Try units in different precisions side by side: which cannot take what others hand them, what cannot be split."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from autoprec.apply.structure import Structure
from autoprec.policy import Policy, Precision, lies_in
from autoprec.units.find import Call, tied_units
from autoprec.units.trial_runs import MAX_ROUNDS, first_failure, refused_by_units

__all__ = ["refused_in_mixtures"]

NUM_MIXTURES = 6
MIXED: tuple[Precision, ...] = ("fp32", "autocast", "fp16")

Refused = dict[str, dict[Precision, str]]


def refused_in_mixtures(
    structure: Structure,
    model: nn.Module,
    run: Callable[[nn.Module], Any],
    *,
    calls: Mapping[str, Call],
    refused: Mapping[str, dict[Precision, str]],
    composites: Mapping[str, Mapping[Precision, str]],
) -> Refused:
    """Run the model with its units in precisions drawn at random; return the units and what each cannot compute in.

    A unit that raises there loses the precision that it had. A module whose own code raises between units of different
    precisions, an attention that masks by the largest number of another dtype say, becomes one unit: it is given whole
    to each precision. What is found of a module holds for those of its class at the same place of other blocks, too.
    Code that holds other such modules is left to the trials.

    Args:
        calls: the first call of every module that is called.
        refused: what each unit cannot compute in, by itself.
        composites: why the code of modules above the units cannot run in some precision.
    """
    found: Refused = {name: dict(reasons) for name, reasons in refused.items()}
    for number in range(NUM_MIXTURES):
        for _ in range(MAX_ROUNDS):
            policy = _mixture(number, structure, found, composites)
            place = first_failure(structure, model, run, policy)
            if place is None or not _learn(*place, policy, structure, calls, found):
                break
    return found


def _mixture(
    number: int, structure: Structure, refused: Refused, composites: Mapping[str, Mapping[Precision, str]]
) -> Policy:
    """Draw a precision for each unit; it stays the same for a unit whatever is learned of others."""
    code = [name for name, reasons in composites.items() if "autocast" in reasons]
    modules: dict[str, Precision] = dict.fromkeys((name for name in code if name), "fp32")
    drawn: dict[str, Precision] = {}
    for name, tied in tied_units(structure, list(refused)).items():
        if name in drawn:
            continue
        group = [name, *tied]
        lost = {precision for unit in group for precision in refused.get(unit, ())}
        choices = [precision for precision in MIXED if precision not in lost]
        drawn |= dict.fromkeys(group, random.Random(f"{number} {name}").choice(choices or ["fp32"]))
    default: Precision = drawn.pop("", "fp32" if "" in code else "autocast")  # the whole model may be one unit
    return Policy(default=default, dtype="fp16", modules=modules | drawn)


def _learn(
    place: str, reason: str, policy: Policy, structure: Structure, calls: Mapping[str, Call], refused: Refused
) -> bool:
    """Note in `refused` what a failure in the module `place` says; False where it says nothing."""
    unit = next((name for name in refused if lies_in(place, name)), None)
    if unit is not None:
        precision = policy.modules[unit] if unit else policy.default
        if precision == "fp32":
            return False
        for peer in _peers(unit, structure, refused):
            for other in ("fp16", "bf16") if precision == "fp16" else (precision,):  # what mixes badly does in either
                refused[peer].setdefault(other, f"next to units of other precisions: {reason}")
        return True
    holds_composites = any(lies_in(name, place) and name not in (place, *refused) for name in calls)
    if not place or holds_composites:
        return False
    for peer in _peers(place, structure, calls):
        for inner in [name for name in refused if lies_in(name, peer)]:
            del refused[inner]
        refused |= refused_by_units({peer: calls[peer]})
    return True


def _peers(name: str, structure: Structure, names: Mapping[str, Any]) -> list[str]:
    """Return the module and those of its class at the same place of other blocks."""

    def kind(other: str) -> tuple[type, str]:
        return type(structure.modules[other]), re.sub(r"\d+", "#", other)

    return [other for other in names if kind(other) == kind(name)]
