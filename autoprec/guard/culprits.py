"""Which unit is at fault: hooks that are on while there is trouble, what they found, how often."""

from __future__ import annotations

import sys
import weakref
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from autoprec.guard.repair import precision_of
from autoprec.policy import Policy
from autoprec.probes.first_non_finite import BadUnit, NonFiniteWatch

__all__ = ["Culprit", "Culprits"]


@dataclass(frozen=True, slots=True)
class Culprit:
    """The unit at fault in one step.

    Attributes:
        name: the nearest module that does not compute in FP32, else the one where it was seen; "" is the model itself.
        seen: what the hooks saw.
        can_move: whether a policy can give it FP32: it has another precision and a name.
    """

    name: str
    seen: BadUnit
    can_move: bool

    def __str__(self) -> str:
        return f"{self.name or 'the model itself'} ({self.seen.phase}: {self.seen.what})"


class Culprits:
    """Looks for the unit at fault while it is told to, and counts over the last steps with trouble.

    Code under torch.compile runs eagerly meanwhile: it would not see hooks that came later.
    """

    def __init__(self, model: nn.Module, *, window: int) -> None:
        self._model = model
        self._watch = NonFiniteWatch(model)
        self._eager: weakref.finalize[..., Any] | None = None
        self._found: deque[tuple[int, str, str]] = deque()
        self._window = window

    @property
    def is_watching(self) -> bool:
        return self._watch.is_watching

    def start(self) -> None:
        if not self._watch.is_watching:
            self._watch.start()
            if "torch._dynamo" in sys.modules:
                stance = torch.compiler.set_stance("force_eager")
                self._eager = weakref.finalize(self, stance.__exit__, None, None, None)  # of the whole process

    def stop(self) -> None:
        self._watch.stop()
        if self._eager is not None:
            self._eager()
            self._eager = None

    def take(self, policy: Policy | None, *, step: int, trouble: bool, in_group: bool) -> Culprit | None:
        """Return the unit at fault in the step that ends, and count it; None where nothing was seen.

        Args:
            trouble: whether the step had any; without, what was seen did no harm and is forgotten.
            in_group: whether all processes of the group had it; else only what this one saw counts, and nothing moves.
        """
        found = self._watch.found
        self._watch.clear()
        is_alone = not _in_group()
        if trouble and in_group and not is_alone:
            found = _first_of_group(found)
        if not trouble or found is None:
            return None
        culprit = self._culprit(found, policy, may_move=is_alone or in_group)
        self._found.append((step, culprit.name, found.phase))
        while self._found[0][0] <= step - self._window:
            self._found.popleft()
        return culprit

    def count(self, culprit: Culprit) -> int:
        """Return in how many of the last steps this unit was at fault in this phase."""
        return sum(found[1:] == (culprit.name, culprit.seen.phase) for found in self._found)

    def forget(self) -> None:
        """Count anew: the policy has changed."""
        self._found.clear()

    def _culprit(self, seen: BadUnit, policy: Policy | None, *, may_move: bool) -> Culprit:
        names = [seen.name, *seen.near] if policy is not None and seen.phase != "input" else []
        low = [name for name in names if name and policy is not None and self._is_low(policy, name)]
        return Culprit(low[0] if low else seen.name, seen, can_move=bool(low) and may_move)

    def _is_low(self, policy: Policy, name: str) -> bool:
        return precision_of(self._model, policy, name) != "fp32"


def _in_group() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _first_of_group(found: BadUnit | None) -> BadUnit | None:
    gathered: list[BadUnit | None] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, found)
    return next((each for each in gathered if each is not None), None)
