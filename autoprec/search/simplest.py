"""The shortest form of a found policy: rules that compute nothing or save nothing dropped, repeated blocks as one glob.

A sampled policy names every unit of every decision. Before it is proved it is brought to the form that a person would
have written, so that what is proved, exported, shown and named is one thing.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping

from autoprec.policy import Policy, Precision, lies_in, parents_of, resolve_precisions
from autoprec.profiling.profile import Profile
from autoprec.search.decision import Decision
from autoprec.search.parameters import Parameters
from autoprec.search.profile_prior import NOTHING

__all__ = ["described", "explicit", "with_globs", "without_idle_rules"]

MAX_NAMED = 4
"""Rules of one precision that a policy's description names."""


def explicit(policy: Policy, parameters: Parameters, names: Iterable[str]) -> Policy:
    """Return the policy with a rule by name for each unit that is not what it would inherit, in place of all globs."""
    precisions, _ = resolve_precisions(policy, parents_of(names))
    return parameters.with_precisions(policy, precisions)


def without_idle_rules(
    policy: Policy, parameters: Parameters, profile: Profile | None, pinned: Iterable[str]
) -> Policy:
    """Return the policy without the rules of decisions that change neither memory nor time against its default.

    Identities, dropouts of an evaluation, average pools: whatever precision such a unit has, the step is the same. A
    rule stays where the profile has no figures for it, where the search was not free to choose it (`pinned`), and
    where taking it away would save something: that it is there for accuracy then.
    """
    if profile is None:
        return policy
    modules = dict(policy.modules)
    for decision in parameters.decisions:
        if decision.is_pinned or decision.name in pinned or not _is_idle(decision, policy, profile):
            continue
        modules = {name: choice for name, choice in modules.items() if name not in decision.units}
    return policy.replace(modules=modules)


def _is_idle(decision: Decision, policy: Policy, profile: Profile) -> bool:
    seconds, peak = profile.step_seconds.get("fp32", 0.0), profile.peak_bytes.get("fp32", 0.0)
    time = memory = 0.0
    for name in decision.units:
        costs = profile.units[name].costs if name in profile.units else {}
        own, default = policy.modules.get(name, policy.default), policy.default
        if own not in costs or default not in costs:
            return False
        time += abs(costs[own].seconds - costs[default].seconds)
        memory += abs(costs[own].peak_bytes - costs[default].peak_bytes)
    return time < NOTHING * seconds and memory < NOTHING * peak


def with_globs(policy: Policy, names: Iterable[str]) -> Policy:
    """Return the policy with the rules of repeated modules as globs: `blocks.*.norm?` for both norms of all blocks.

    The same precision for each of the model's modules, which is checked; where that cannot be had by globs the policy
    comes back as it is.
    """
    parents = parents_of(names)
    rules: dict[str, Precision] = {}
    for name, precision in policy.modules.items():
        rules.setdefault(_widest(name, precision, policy.modules, parents), precision)
    short = policy.replace(modules=rules)
    same = resolve_precisions(short, parents)[0] == resolve_precisions(policy, parents)[0]
    return short if same and len(rules) < len(policy.modules) else policy


def _widest(name: str, precision: Precision, rules: Mapping[str, Precision], names: Iterable[str]) -> str:
    """Return the widest pattern of a name that matches only modules of rules with its precision, and at least two."""
    blocks = re.sub(r"(?<![^.])\d+(?![^.])", "*", name)
    own = [rule for rule, choice in rules.items() if choice == precision]
    for pattern in (re.sub(r"(?<=[a-z_])\d(?=\.|$)", "?", blocks), blocks):
        if pattern == name:
            continue
        matched = [other for other in names if fnmatch.fnmatchcase(other, pattern)]
        strangers = [other for other in matched if not any(lies_in(other, rule) for rule in own)]
        if not strangers and sum(other in rules for other in matched) > 1:
            return pattern
    return name


def described(policy: Policy) -> str:
    """Name a policy by what it does: "autocast BF16, blocks.*.norm? and norm in BF16"."""
    default = f"autocast {policy.dtype.upper()}" if policy.default == "autocast" else policy.default.upper()
    parts = [default]
    for precision in ("fp32", "autocast", "bf16", "fp16"):
        rules = [rule for rule, choice in policy.modules.items() if choice == precision]
        if len(rules) > MAX_NAMED:
            rules = [*rules[: MAX_NAMED - 1], f"{len(rules) - MAX_NAMED + 1} more rules"]
        if rules:
            told = " and ".join(filter(None, [", ".join(rules[:-1]), rules[-1]]))
            parts.append(f"{told} in {'autocast' if precision == 'autocast' else precision.upper()}")
    if policy.grad_scaler is not None:
        parts.append(f"init_scale {policy.grad_scaler.init_scale:g}")
    if policy.optimizer is not None:
        changed = policy.optimizer.model_dump(exclude_none=True)
        parts.append(
            ", ".join(
                f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}"
                for name, value in changed.items()
            )
        )
    return ", ".join(parts)[:400]
