"""Estimates as tables: memory by category and by unit, throughput, what a budget allows and what makes a batch fit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from rich.table import Table

from autoprec.estimates import Remedy, StepEstimate
from autoprec.policy import Number
from autoprec.report.escaping import escaped
from autoprec.report.quantities import show_bytes, show_ratio, show_throughput

__all__ = ["estimate_table", "group_units", "remedy_table", "unit_table"]


def estimate_table(
    arms: Mapping[str, StepEstimate], *, title: str, largest: Mapping[str, int | None] | None = None, budget: str = ""
) -> Table:
    """Return one column an arm: the peak and its categories, which add up to it, throughput, and the largest batch."""
    first = next(iter(arms.values()))
    table = _table(title, arms)
    peaks = {name: step.peak_memory_bytes for name, step in arms.items()}
    table.add_row("peak memory", *(_with_kind(show_bytes(n), n, show_ratio(n, peaks["fp32"])) for n in peaks.values()))
    for category in first.by_category:
        sizes = [step.memory.by_category[category] for step in arms.values()]  # type: ignore[index]
        if any(sizes):
            table.add_row(f"  {category.replace('_', ' ')}", *map(_bytes, sizes))
    table.add_section()
    speeds = {name: step.throughput_samples_per_second for name, step in arms.items()}
    cells = (_with_kind(show_throughput(n), n, show_ratio(n, speeds["fp32"])) for n in speeds.values())
    table.add_row("throughput", *cells)
    table.add_row("  host busy starting kernels", *(f"{step.launch_share:.0%}" for step in arms.values()))
    table.add_row("fits the GPU", *("yes" if step.fits else "no" for step in arms.values()))
    if largest is not None:
        table.add_row(f"largest batch in {budget}", *(_largest(largest[name], step) for name, step in arms.items()))
    return table


def _largest(batch: int | None, step: StepEstimate) -> str:
    return "not known" if batch is None else f"{batch:,} {step.peak_memory_bytes.kind}"


def unit_table(arms: Mapping[str, StepEstimate], *, count: int) -> Table:
    """Return the units with most bytes at the peak of the first arm, and all others as one row; they add up to it."""
    grouped = {name: group_units(step.by_unit, count) for name, step in arms.items()}
    table = _table("memory by unit at the peak, computed", arms)
    order = list(dict.fromkeys(unit for units in grouped.values() for unit in units))
    for unit in order:
        shown = escaped(unit) if unit else "(inputs, loss and the model's own code)"
        table.add_row(shown, *(_bytes(units.get(unit, 0)) for units in grouped.values()))
    return table


def group_units(by_unit: Mapping[str, int], count: int) -> dict[str, int]:
    """Add the bytes of modules to those of the module above while that leaves `count` rows or more: a readable tree."""
    depth = max((name.count(".") + 1 if name else 0 for name in by_unit), default=0)
    while depth > 1 and len({_cut(name, depth) for name in by_unit}) > count:
        depth -= 1
    grouped: Counter[str] = Counter()
    for name, size in by_unit.items():
        grouped[_cut(name, depth)] += size
    return dict(grouped)


def remedy_table(remedies: Sequence[Remedy], *, title: str) -> Table:
    """Return the ways to make a batch fit, cheapest first; the first that fits is marked."""
    table = Table(title=escaped(title), title_justify="left")
    for name in ("", "fits", "peak memory", "throughput", "how"):
        table.add_column(name)
    chosen = next((remedy for remedy in remedies if remedy.fits), None)
    for remedy in remedies:
        speed = remedy.throughput_samples_per_second
        modules = f": {', '.join(remedy.modules)}" if remedy.modules else ""
        table.add_row(
            f"[bold]{remedy.name}[/]" if remedy is chosen else remedy.name,
            "yes" if remedy.fits else "no",
            _with_kind(show_bytes(remedy.peak_bytes), remedy.peak_bytes),
            "not predicted" if speed is None else _with_kind(show_throughput(speed), speed),
            escaped(remedy.setting + modules),
        )
    return table


def _table(title: str, arms: Mapping[str, StepEstimate]) -> Table:
    table = Table(title=escaped(title), title_justify="left")
    table.add_column("")
    for name in arms:
        table.add_column(escaped(name), justify="right")
    return table


def _bytes(size: int) -> str:
    return show_bytes(Number(value=float(size), kind="computed")) if size else "-"


def _with_kind(shown: str, number: Number, ratio: str = "") -> str:
    return "\n".join(part for part in (f"{shown} {ratio}".strip(), number.kind) if part)


def _cut(name: str, depth: int) -> str:
    return ".".join(name.split(".")[:depth])
