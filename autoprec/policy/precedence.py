"""Which rule of a policy decides for which module. Pure.

Rules of precedence, for one module (names as `model.named_modules()` gives them):

1. An exact name counts for that module and everything below it; the nearest one wins.
   `{"layer4": "fp32", "layer4.0.conv1": "fp16"}`: `layer4.0.conv1` is fp16, the rest of `layer4` fp32.
   A module's name that looks like a glob (`columns.age[years]`) is an exact name.
2. Where no exact name encloses the module, a glob that matches it or a module above it (the nearest first). Globs match
   the full name, `*` also crosses dots; of several globs the one with the most literal characters wins, then the later.
   `{"layer4.*": "fp32"}`: everything below `layer4`; `layer40` is not touched.
3. The default. `{}`: every module computes in `default`.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autoprec.policy.evidence import Precision
    from autoprec.policy.values import Policy

__all__ = ["is_glob", "lies_in", "parents_of", "resolve_precisions"]


def is_glob(rule: str) -> bool:
    return any(character in rule for character in "*?[")


def lies_in(name: str, module: str) -> bool:
    """Whether `name` is `module` or a part of it; everything lies in the root, whose name is empty.

    `layer4.0` lies in `layer4`, `layer40` does not.
    """
    return not module or name == module or name.startswith(f"{module}.")


def parents_of(names: Iterable[str]) -> dict[str, str | None]:
    """Return each dotted name, and every module above it, with the name of the module it lives in; parents first."""
    parents: dict[str, str | None] = {"": None}
    for name in names:
        parts = name.split(".") if name else []
        for count in range(1, len(parts) + 1):
            parents.setdefault(".".join(parts[:count]), ".".join(parts[: count - 1]))
    return parents


def resolve_precisions(
    policy: Policy, parents: Mapping[str, str | None]
) -> tuple[dict[str, Precision], dict[str, str | None]]:
    """Resolve the policy for each module name by the precedence at the top of this file. Pure.

    Args:
        policy: the policy.
        parents: each module name -> the name of the module it lives in, None for the root. Parents come first.

    Returns:
        The precision of each name, and the rule that decided it (None for the default).
    """
    exact: dict[str, str | None] = {}
    glob: dict[str, str | None] = {}
    globs = _ordered_globs(tuple(rule for rule in policy.modules if is_glob(rule) and rule not in parents))
    for name, parent in parents.items():
        inherited_exact = None if parent is None else exact[parent]
        inherited_glob = None if parent is None else glob[parent]
        exact[name] = name if name in policy.modules else inherited_exact
        glob[name] = next((rule for rule, pattern in globs if pattern.match(name)), inherited_glob)
    rules = {name: exact[name] or glob[name] for name in parents}
    return {name: policy.default if rule is None else policy.modules[rule] for name, rule in rules.items()}, rules


@lru_cache(maxsize=64)
def _ordered_globs(rules: tuple[str, ...]) -> tuple[tuple[str, re.Pattern[str]], ...]:
    def literals(item: tuple[int, str]) -> tuple[int, int]:
        index, rule = item
        return (sum(character not in "*?[]" for character in rule), index)

    ordered = [rule for _, rule in sorted(enumerate(rules), key=literals, reverse=True)]
    return tuple((rule, re.compile(fnmatch.translate(rule))) for rule in ordered)
