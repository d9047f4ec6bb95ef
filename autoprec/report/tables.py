"""Tables and trees for a terminal, built from data alone. Names are escaped: nothing in a file can style the output."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from rich.table import Table
from rich.tree import Tree

from autoprec.policy import ArmEvidence, Number, Policy, PolicyDifference, UnitEvidence, is_glob, known_precisions
from autoprec.report.escaping import escaped
from autoprec.report.quantities import show_accuracy, show_bytes, show_ratio, show_ratio_number, show_throughput
from autoprec.search.gate import Gate

__all__ = ["comparison_table", "difference_table", "unit_tree", "evidence_lines", "gate_lines"]

ROWS: tuple[tuple[str, str, str | None, Callable[[Number | None], str]], ...] = (
    ("peak memory", "peak_memory_bytes", "memory_ratio", show_bytes),
    ("throughput", "throughput_samples_per_second", "throughput_ratio", show_throughput),
    ("tokens", "throughput_tokens_per_second", "throughput_ratio", show_throughput),
    ("accuracy", "accuracy", None, show_accuracy),
)
"""Label, field, the field of its ratio to FP32 (None: a ratio would mislead), how it is shown."""
OPTIONAL = ("throughput_tokens_per_second",)
"""Fields whose row is left out where no arm has them."""


def comparison_table(
    arms: Mapping[str, ArmEvidence], *, metric: str = "accuracy", reference: str = "fp32", title: str | None = None
) -> Table:
    """Return one column an arm; each number with its ratio to the reference and its kind.

    Accuracies are those of the proof alone, under the metric's own name. A reference that is no arm is FP32.
    """
    base_name = reference if reference in arms else "fp32"
    told = f"ratios are to {base_name}" if base_name in arms else ""
    heading = " ".join(filter(None, ["" if title is None else title, f"({told})" if told else ""]))
    table = Table(title=escaped(heading) if heading else None, title_justify="left")
    table.add_column("")
    for name in arms:
        table.add_column(escaped(name), justify="right")
    base = arms.get(base_name)
    for label, field, ratio_field, show in ROWS:
        if field in OPTIONAL and all(getattr(evidence, field) is None for evidence in arms.values()):
            continue
        cells = []
        for evidence in arms.values():
            number: Number | None = getattr(evidence, field)
            ratio = "" if ratio_field is None else _ratio(evidence, base, field, ratio_field)
            kind = "" if number is None else number.kind
            cells.append("\n".join(part for part in (f"{show(number)} {ratio}".strip(), kind) if part))
        table.add_row(f"{escaped(metric)} (proof)" if field == "accuracy" else label, *cells)
    table.add_row("proof", *(escaped(evidence.note.partition(":")[0]) for evidence in arms.values()))
    return table


def _ratio(evidence: ArmEvidence, base: ArmEvidence | None, field: str, ratio_field: str) -> str:
    """Show a number over the base's: by the ratios that were measured in pairs with FP32, where both have one."""
    own: Number | None = getattr(evidence, ratio_field)
    others: Number | None = None if base is None else getattr(base, ratio_field)
    if own is not None and others is None and base is not evidence:
        return show_ratio_number(own)  # the base is FP32 itself
    if own is not None and others is not None and own.kind == others.kind:
        return f"{own.value / others.value:.2f}x"
    return show_ratio(getattr(evidence, field), None if base is None else getattr(base, field))


def unit_tree(policy: Policy, *, title: str) -> Tree:
    """Return the model as a tree of module names: each unit's precision, its reason, and what stands behind it.

    The modules are those that the policy remembers of its model and those its evidence or rules name.
    """
    tree = Tree(escaped(title))
    units = policy.evidence.units if policy.evidence is not None else {}
    known = known_precisions(policy)
    if policy.model is None:
        known |= {rule: (precision, rule) for rule, precision in policy.modules.items() if is_glob(rule)}
    branches: dict[str, Tree] = {"": tree}
    for name in dict.fromkeys([*units, *known]):
        unit = units.get(name)
        precision, rule = known[name] if unit is None else (unit.precision, name)
        text = _because(rule, name) if unit is None else "  ".join(filter(None, [unit.reason, _figures(unit)]))
        _put(branches, name, f"[bold]{escaped(name.rpartition('.')[2])}[/]  {precision}  {escaped(text)}".rstrip())
    return tree


def _because(rule: str | None, name: str) -> str:
    if rule is None:
        return "default"
    return "" if rule == name else f"by {rule}"


def _figures(unit: UnitEvidence) -> str:
    """Return what was found out about a unit, in brackets."""
    parts = [
        "" if unit.headroom_octaves is None else f"{unit.headroom_octaves:.1f} octaves to overflow",
        "" if unit.flushed_share is None else f"{unit.flushed_share:.1%} of gradients flushed",
        "" if unit.error_score is None else f"error {unit.error_score:.1e}",
        "" if unit.saved_bytes is None else f"saves {show_bytes(unit.saved_bytes)} {unit.saved_bytes.kind}",
        "" if unit.saved_seconds is None
        else f"saves {unit.saved_seconds.value * 1e3:.2f} ms {unit.saved_seconds.kind}",
    ]  # fmt: skip
    found = "; ".join(part for part in parts if part)
    return f"({found})" if found else ""


def _put(branches: dict[str, Tree], name: str, label: str) -> None:
    """Give a module its line; it may have been a branch already."""
    if name in branches and name:
        branches[name].label = label
    elif name:
        branches[name] = _branch(branches, name.rpartition(".")[0]).add(label)


def difference_table(difference: PolicyDifference, *, names: tuple[str, str]) -> Table:
    """Return one row a difference: what it is, the first policy's and the second's."""
    table = Table(title_justify="left")
    for name in ("", *names):
        table.add_column(escaped(name))
    for rule, pair in difference.rules.items():
        table.add_row(escaped(f"rule {rule}"), *(precision or "-" for precision in pair))
    for unit, pair in difference.units.items():
        count = difference.num_units[unit]
        table.add_row(escaped(f"{unit} ({count} units)" if count > 1 else unit), *(p or "-" for p in pair))
    for setting, values in difference.settings.items():
        table.add_row(escaped(setting), *("-" if value is None else escaped(_shown(value)) for value in values))
    for label, field, _, show in ROWS:
        numbers = difference.numbers.get(field)
        if numbers is not None:
            table.add_row(label, *(f"{show(n)} {n.kind}" if n is not None else "-" for n in numbers))
    return table


def _branch(branches: dict[str, Tree], name: str) -> Tree:
    if name not in branches:
        parent, _, last = name.rpartition(".")
        branches[name] = _branch(branches, parent).add(escaped(last))
    return branches[name]


def evidence_lines(policy: Policy) -> list[str]:
    """Return the policy's summary, one fact a line, unescaped."""
    lines = [f"default {policy.default}, autocast dtype {policy.dtype}, {len(policy.modules)} modules named"]
    if policy.needs_grad_scaler:
        scaler = policy.grad_scaler
        lines.append(
            "grad scaler: torch's defaults"
            if scaler is None
            else f"grad scaler: init_scale {scaler.init_scale:g}, growth_factor {scaler.growth_factor:g}, "
            f"backoff_factor {scaler.backoff_factor:g}, growth_interval {scaler.growth_interval}"
        )
    if policy.optimizer is not None:
        changed = {n: v for n, v in policy.optimizer.model_dump().items() if v is not None}
        lines.append("optimizer: " + ", ".join(f"{name} {value}" for name, value in changed.items()))
    if policy.training is not None and policy.training.changed:
        lines.append("training: " + ", ".join(f"{name} {_shown(v)}" for name, v in policy.training.changed.items()))
    if policy.model is not None:
        lines.append(f"model {policy.model.name}, {len(policy.model.modules)} modules")
    if policy.provenance is not None:
        found = policy.provenance
        where = found.device_name or f"{found.target_gpu or '?'} (not there: computed and predicted)"
        lines.append(f"found {found.created or '?'} for {where}, study {found.study_name or '?'}")
        if "target_batch_size" in found.settings:
            shape = found.settings.get("target_shape") or "its longest batch"
            lines.append(f"memory and throughput at batch {found.settings['target_batch_size']}: {shape}")
    if policy.evidence is not None and policy.evidence.verification is not None:
        proof = policy.evidence.verification
        provable = "" if proof.provable_margin is None else f", smallest provable margin {proof.provable_margin:.3f}"
        share = "" if proof.max_lost_share is None else f" ({proof.max_lost_share:.0%} of what FP32 gained)"
        margin = "no margin" if proof.margin is None else f"margin {proof.margin:.4g} of {proof.metric}{share}"
        lines.append(f"proof: {proof.num_seeds} seeds of {proof.num_steps} steps, {margin}{provable}")
        if proof.end_scale_low is not None and proof.end_scale_high is not None and policy.needs_grad_scaler:
            low, high = (math.log2(end) for end in (proof.end_scale_low, proof.end_scale_high))
            lines.append(
                f"loss scale: safe from 2^{low:.0f} to 2^{high:.0f} at the start and at FP32's trained weights"
            )
        if proof.end_largest_activation is not None:
            largest = f"{proof.end_largest_activation:.4g} in {proof.end_module}"
            lines.append(f"largest activation at FP32's trained weights: {largest}")
        if proof.gain is not None and proof.gain_low is not None and proof.start_accuracy is not None:
            shown = "enough for the margin" if proof.sensitive else "too little for the margin: nothing is proved"
            lines.append(
                f"FP32 itself: {proof.metric} {proof.start_accuracy:.4g} at the start weights, then better by "
                f"{proof.gain:.4g} (at least {proof.gain_low:.4g}): {shown}"
            )
    return lines


def gate_lines(gate: Gate) -> list[str]:
    """Return what a file promises beside what was found, one promise a line, unescaped."""
    shown = {"peak memory": show_bytes, "throughput over FP32": show_ratio_number, "accuracy": show_accuracy}
    lines = [
        f"{'BEHIND' if c.behind else 'kept'}: {c.what} {shown[c.what](c.found)}, the file says "
        f"{shown[c.what](c.promised)} ({c.found.kind}; {c.allowed} allowed)"
        for c in gate.comparisons
    ]
    return [*lines, *(f"not compared: {note}" for note in gate.notes)]


def _shown(value: object) -> str:
    return " ".join(value) if isinstance(value, tuple) else str(value)
