"""The model as a map: its modules as nested tiles, coloured by precision and by how sensitive each unit is to FP16."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from autoprec.policy import Precision
from autoprec.report.figures.style import PRECISION_COLOURS, named, new_figure, shorten
from autoprec.report.saved_search import SavedSearch
from autoprec.search.names import last_part, parent_of, prefixes_of

__all__ = ["precision_map", "precision_strips", "sensitivity_map"]

PARENT_COLOUR = "#e4e7ec"
"""Of modules that hold units; the page has another one where it is dark."""
MAP_HEIGHT = 460
SENSITIVITY_COLOURS = ((0.0, "#2b6cb0"), (0.5, "#f2d06b"), (1.0, "#c53030"))
ROOT = " "
"""Id of the tile of the whole model: no module is called so."""
PADDING = {"t": 17, "l": 2, "r": 2, "b": 2}
SMALLEST_TILE = 0.2
"""Of the mean: units that hold no memory are still to be seen."""


def precision_map(search: SavedSearch) -> go.Figure | None:
    """Return the units as tiles, as large as their part of FP32's peak memory, in the colour of their precision."""
    if not search.units:
        return None
    precisions = search.precisions(search.policy)
    figure = _new_map()
    colours = {unit: PRECISION_COLOURS[precision] for unit, precision in precisions.items()}
    texts = {unit: f"{precision}{_reason(search, unit)}" for unit, precision in precisions.items()}
    figure.add_trace(_tiles(search, colours=colours, texts=texts))
    _add_legend(figure, [p for p in PRECISION_COLOURS if p in precisions.values()])
    return figure


def sensitivity_map(search: SavedSearch) -> go.Figure | None:
    """Return the units as tiles in the colour of their error score: what FP16 there does to the loss, by the profile.

    A tile that holds others has the colour of the most sensitive of them.
    """
    if search.profile is None or not search.units:
        return None
    scores = {name: max(unit.error_score(search.policy.dtype), 1e-9) for name, unit in search.profile.units.items()}
    values = {name: math.log10(score) for name, score in scores.items()}
    for name in list(values):
        for above in [ROOT, *(prefixes_of(parent_of(name)) if parent_of(name) else [])]:
            values[above] = max(values.get(above, -math.inf), values[name])
    low, high = math.floor(min(values.values())), math.ceil(max(values.values()))
    figure = _new_map()
    tiles = _tiles(
        search,
        colours=values,
        texts={name: f"loss moves by {score:.2g} of itself{_ranges(search, name)}" for name, score in scores.items()},
    )
    ticks = list(range(low, max(high, low + 1) + 1))
    tiles.domain.update(y=[0, 0.89])  # the colours stand above it
    tiles.marker.update(
        colorscale=[list(pair) for pair in SENSITIVITY_COLOURS],
        cmin=ticks[0],
        cmax=ticks[-1],
        showscale=True,
        colorbar={
            "orientation": "h",
            "len": 0.92,
            "y": 0.9,
            "yanchor": "bottom",
            "thickness": 10,
            "tickvals": ticks,
            "ticktext": [f"1e{tick}" for tick in ticks],
        },
    )
    figure.add_trace(tiles)
    return figure


def precision_strips(search: SavedSearch) -> go.Figure | None:
    """Return one row a policy, one column a unit in the order of the calls."""
    if not search.units:
        return None
    places = {precision: place for place, precision in enumerate(PRECISION_COLOURS)}
    rows = [search.precisions(member.policy) for member in search.members]
    figure = new_figure(height=130 + 28 * len(rows))
    steps = [
        (place / len(places), (place + 1) / len(places), colour)
        for place, colour in enumerate(PRECISION_COLOURS.values())
    ]
    figure.add_heatmap(
        z=[[places[precision] for precision in row.values()] for row in rows],
        x=list(range(len(search.units))),
        y=[f"{place}. {shorten(member.name)}" for place, member in enumerate(search.members, start=1)],
        text=[[f"{named(unit)}: {precision}" for unit, precision in row.items()] for row in rows],
        hovertemplate="%{text}<extra></extra>",
        zmin=-0.5,
        zmax=len(places) - 0.5,
        colorscale=[[edge, colour] for low, high, colour in steps for edge in (low, high)],
        showscale=False,
        ygap=3,
    )
    _add_legend(figure, [p for p in PRECISION_COLOURS if any(p in row.values() for row in rows)], hide_axes=False)
    figure.update_xaxes(title="units in the order of their calls", showgrid=False)
    figure.update_yaxes(autorange="reversed", showgrid=False)
    return figure


def _new_map() -> go.Figure:
    return new_figure(height=MAP_HEIGHT).update_layout(margin={"l": 0, "r": 0, "t": 36, "b": 0})


def _tiles(search: SavedSearch, *, colours: Mapping[str, Any], texts: Mapping[str, str]) -> go.Treemap:
    sizes = _sizes(search)
    names = [ROOT, *dict.fromkeys(prefix for unit in search.units for prefix in prefixes_of(unit))]
    return go.Treemap(
        ids=names,
        labels=[named(last_part(name) or search.front.task) for name in names],
        parents=["", *(parent_of(name) or ROOT for name in names[1:])],
        values=[sizes.get(name, 0.0) for name in names],
        branchvalues="remainder",
        marker={"colors": [colours.get(name, PARENT_COLOUR) for name in names], "line": {"width": 1}, "pad": PADDING},
        text=[texts.get(name, "") for name in names],
        texttemplate="%{label}",
        hovertext=[f"{named(name)}<br>{texts[name]}" if name in texts else named(name.strip()) for name in names],
        hovertemplate="%{hovertext}<extra></extra>",
        tiling={"pad": 1},
        pathbar={"visible": False},
        sort=False,
    )


def _sizes(search: SavedSearch) -> dict[str, float]:
    """Return the area of each unit: its part of FP32's peak memory, at least `SMALLEST_TILE` of the mean, or equal."""
    if search.profile is None:
        return dict.fromkeys(search.units, 1.0)
    held = {n: u.costs["fp32"].peak_bytes if "fp32" in u.costs else 0.0 for n, u in search.profile.units.items()}
    least = SMALLEST_TILE * sum(held.values()) / max(1, len(held)) or 1.0
    return {name: max(size, least) for name, size in held.items()}


def _reason(search: SavedSearch, unit: str) -> str:
    evidence = None if search.policy.evidence is None else search.policy.evidence.units.get(unit)
    return "" if evidence is None or not evidence.reason else f"<br>{named(evidence.reason)}"


def _ranges(search: SavedSearch, name: str) -> str:
    assert search.profile is not None
    unit = search.profile.units[name]
    if search.policy.dtype == "bf16":
        error = unit.half.get("bf16")
        return "" if error is None else f"<br>output off by {error.output:.2%} in BF16"
    headroom = (
        ""
        if unit.headroom_octaves is None
        else f"<br>largest activation {unit.headroom_octaves:.1f} octaves below 65504"
    )
    return headroom + ("<br>overflows in FP16" if unit.overflows else "")


def _add_legend(figure: go.Figure, precisions: Sequence[Precision], *, hide_axes: bool = True) -> None:
    for precision in precisions:
        figure.add_scatter(
            x=[None],
            y=[None],
            mode="markers",
            name=precision,
            marker={"symbol": "square", "size": 12, "color": PRECISION_COLOURS[precision]},
        )
    figure.update_layout(showlegend=True)
    if hide_axes:
        figure.update_xaxes(visible=False)
        figure.update_yaxes(visible=False)
