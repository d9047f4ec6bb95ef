"""Move a unit to FP32 in a model that is being trained, and write the policy that this makes."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

from torch import nn

from autoprec.apply import applied_policy, apply_policy, read_structure, remove_policy
from autoprec.apply.plan import resolve_plan
from autoprec.apply.structure import without_prefixes
from autoprec.errors import ApplyError, PrecisionWarning, UsageError
from autoprec.policy import Evidence, Policy, Precision, UnitEvidence, lies_in

__all__ = ["Mover", "exchange_policy", "free_path", "precision_of", "with_units_in_fp32"]


def with_units_in_fp32(policy: Policy, units: tuple[str, ...], *, reason: str) -> Policy:
    """Return the policy with these modules, and all below them, in FP32. Pure.

    What was proved was another policy: numbers, proof and recommendation are left out, the evidence of units stays.
    """

    def is_below(rule: str) -> bool:
        names = {rule, without_prefixes(rule)}
        return any(lies_in(name, unit) for unit in units for name in names)

    rules: dict[str, Precision] = {rule: p for rule, p in policy.modules.items() if not is_below(rule)}
    known = policy.evidence.units if policy.evidence is not None else {}
    evidence = {name: found for name, found in known.items() if not is_below(name)}
    return policy.replace(
        modules={**rules, **dict.fromkeys(units, "fp32")},
        evidence=Evidence(
            units={**evidence, **{unit: UnitEvidence(precision="fp32", reason=reason) for unit in units}}
        ),
        recommendation=None,
    )


def precision_of(model: nn.Module, policy: Policy, name: str) -> Precision:
    """Return what the policy gives the module called `name`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PrecisionWarning)
        return resolve_plan(read_structure(model), policy, strict=False).precision(name)


class Mover:
    """Moves units of a model to FP32, one after the other, and writes each policy that this makes to a new file.

    Raises:
        UsageError: the model has no policy.
    """

    def __init__(self, model: nn.Module, path: str | os.PathLike[str]) -> None:
        policy = applied_policy(model)
        if policy is None:
            raise UsageError("units are to be moved (patched_policy) and the model has no policy: apply_policy first")
        self.policy = policy
        self._model = model
        self._path = path

    def move(self, unit: str, *, reason: str, writes: bool) -> str:
        """Give a module, and what shares a weight with it, FP32; say where the policy now in force was written.

        Parameters, optimizer state and hooks stay as they are. One process of a group writes. A disk that is full does
        not end a training.

        Raises:
            ApplyError: the changed policy cannot be applied; the model has the old one.
        """
        changed = with_units_in_fp32(self.policy, _moved_together(self._model, unit), reason=reason)
        self.policy = exchange_policy(self._model, changed)
        if not writes:
            return "the first process writes the policy"
        try:
            place = free_path(self._path)
            self.policy.save(place)
        except OSError as error:
            return f"the policy could not be written ({error.strerror})"
        return f"the policy is in {place.name}"


def exchange_policy(model: nn.Module, policy: Policy) -> Policy:
    """Put `policy` in the place of the one that the model has, if it has one; return it.

    Raises:
        ApplyError: it does not fit; the model has the one that it had.
    """
    old = applied_policy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PrecisionWarning)  # they were told when the first policy was applied
        if old is not None:
            remove_policy(model)
        try:
            apply_policy(model, policy, strict=False)
        except ApplyError:
            if old is not None:
                apply_policy(model, old, strict=False)
            raise
    return policy


def free_path(path: str | os.PathLike[str]) -> Path:
    """Return the path, with -2, -3 ... before its suffix where a file of that name is there."""
    wanted = Path(path)
    place, number = wanted, 2
    while place.exists():
        place, number = wanted.with_name(f"{wanted.stem}-{number}{wanted.suffix}"), number + 1
    return place


def _moved_together(model: nn.Module, unit: str) -> tuple[str, ...]:
    """Return the module's names, and the modules outside of it, not around it, that hold one of its parameters."""
    structure = read_structure(model)
    own = {id(parameter) for parameter in structure.modules[unit].parameters()}
    aliases = structure.names[id(structure.modules[unit])]
    sharing = [
        name
        for name, module in structure.modules.items()
        if any(id(parameter) in own for parameter in module._parameters.values())
        and not any(lies_in(name, alias) or lies_in(alias, name) for alias in aliases)
    ]
    return tuple(dict.fromkeys([unit, *aliases, *(structure.governors.get(name, name) for name in sharing)]))
