"""What a step costs: memory by category, and time by part of the model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import plotly.graph_objects as go

from autoprec.policy import Precision
from autoprec.profiling.profile import UnitProfile
from autoprec.report.figures.style import PRECISION_COLOURS, SERIES, byte_unit, named, new_figure, shorten
from autoprec.report.saved_search import SavedSearch
from autoprec.search.arms import FP32

__all__ = ["memory_by_category", "time_by_part"]

MAX_PARTS = 12
REST = "between the units"


def memory_by_category(search: SavedSearch) -> go.Figure | None:
    """Return the peak memory of FP32, the recommendation and the other arms, by category."""
    arms = {name: o.memory_by_category for name, o in search.outcomes.items() if o.memory_by_category}
    if not arms:
        return None
    order = sorted(arms, key=lambda name: (name != FP32, name != search.front.recommended))
    categories = sorted(
        {c for held in arms.values() for c in held}, key=lambda c: -max(h.get(c, 0) for h in arms.values())
    )
    size, unit = byte_unit(max(sum(held.values()) for held in arms.values()))
    figure = new_figure(height=150 + 34 * len(order), barmode="stack")
    for place, category in enumerate(categories):
        figure.add_bar(
            x=[arms[name].get(category, 0.0) / size for name in order],
            y=[shorten(name) for name in order],
            orientation="h",
            name=named(category.replace("_", " ")),
            marker={"color": SERIES[place % len(SERIES)], "line": {"width": 0}},
            hovertemplate=f"%{{x:.4g}} {unit}",
        )
    figure.update_xaxes(title=f"{unit} at the peak")
    figure.update_yaxes(autorange="reversed", showgrid=False)
    return figure


def time_by_part(search: SavedSearch) -> go.Figure | None:
    """Return the predicted time of each part of the model in a step: FP32, autocast, half and as recommended."""
    if search.profile is None or not search.profile.step_seconds:
        return None
    units, step = search.profile.units, search.profile.step_seconds
    uniform: tuple[Precision, ...] = ("fp32", "autocast", "fp16")
    bars: dict[str, tuple[str, dict[str, float]]] = {}
    for precision in uniform:
        if precision in step:
            everywhere = dict.fromkeys(units, precision)
            bars[precision] = PRECISION_COLOURS[precision], _by_part(units, everywhere, step[precision])
    bars["recommended"] = SERIES[0], _by_part(units, search.precisions(search.policy), None)
    parts = list(next(iter(bars.values()))[1])
    figure = new_figure(height=170 + 15 * len(bars) * len(parts), barmode="group", bargap=0.25)
    for name, (colour, seconds) in bars.items():
        figure.add_bar(
            x=[1e3 * seconds[part] if part in seconds else None for part in parts],
            y=[shorten(part) for part in parts],
            orientation="h",
            name=name,
            marker={"color": colour, "line": {"width": 0}},
            hovertemplate="%{x:.3f} ms",
        )
    figure.update_xaxes(title="ms of a step, predicted")
    figure.update_yaxes(autorange="reversed", showgrid=False)
    return figure


def _by_part(
    units: Mapping[str, UnitProfile], precisions: Mapping[str, Precision], total: float | None
) -> dict[str, float]:
    """Add up the seconds of units by part; what is left of `total` is spent between the units."""
    depth = _depth(list(units))
    seconds: dict[str, float] = defaultdict(float)
    for name, unit in units.items():
        wanted = precisions[name]
        cost = unit.costs.get("fp16" if wanted == "bf16" else wanted)
        seconds[".".join(name.split(".")[:depth])] += 0.0 if cost is None else cost.seconds
    if total is not None:
        seconds[REST] = max(0.0, total - sum(seconds.values()))
    return dict(seconds)


def _depth(names: list[str]) -> int:
    """Return how many parts of a name to keep: the deepest that gives at most `MAX_PARTS` parts of the model."""
    deepest = max(name.count(".") + 1 for name in names)
    fitting = [d for d in range(1, deepest + 1) if len({".".join(n.split(".")[:d]) for n in names}) <= MAX_PARTS]
    return fitting[-1] if fitting else 1
