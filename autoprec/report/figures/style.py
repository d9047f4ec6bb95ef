"""What all figures share: colours that stand out on white and on black, sizes, names that plotly cannot read as HTML.

Text and grid lines take their colours in the page, from its style sheet; a figure leaves them open.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape
from typing import Any

import plotly.graph_objects as go

from autoprec.policy import Precision
from autoprec.search.arms import AUTOCAST_BF16, AUTOCAST_FP16, FP32

__all__ = ["PRECISION_COLOURS", "SERIES", "arm_colours", "byte_unit", "named", "new_figure", "rgba", "shorten"]

PRECISION_COLOURS: Mapping[Precision, str] = {
    "fp32": "#7f8c9b",
    "autocast": "#e69f00",
    "fp16": "#00a07a",
    "bf16": "#b06bc9",
}
BASELINE_COLOURS = {FP32: "#7f8c9b", AUTOCAST_FP16: "#e69f00", AUTOCAST_BF16: "#b06bc9"}
SERIES = ("#0090d9", "#e0563f", "#00a07a", "#c9a400", "#d9679f", "#5f7fd0", "#8a6d3b", "#4db6ac")
"""Colours of what is no baseline, in the order of their use."""
MAX_NAME = 32


def new_figure(*, height: int = 380, **layout: Any) -> go.Figure:
    """Return an empty figure with a horizontal legend above it and no colours of its own."""
    figure = go.Figure()
    figure.update_layout(
        template="none",
        height=height,
        margin={"l": 56, "r": 16, "t": 40, "b": 48},
        font={"family": "system-ui, sans-serif", "size": 12},
        legend={"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "traceorder": "normal"},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        **layout,
    )
    figure.update_xaxes(automargin=True, zeroline=False)
    figure.update_yaxes(automargin=True, zeroline=False)
    return figure


def arm_colours(names: Iterable[str]) -> dict[str, str]:
    """Give each arm a colour; baselines have the same in every report."""
    colours = dict(BASELINE_COLOURS)
    for name in names:
        if name not in colours:
            colours[name] = SERIES[(len(colours) - len(BASELINE_COLOURS)) % len(SERIES)]
    return colours


def byte_unit(largest: float) -> tuple[float, str]:
    """Return the size and the name of the unit in which memory up to `largest` bytes is shown."""
    return (2.0**30, "GiB") if largest >= 0.1 * 2**30 else (2.0**20, "MiB")


def named(text: str) -> str:
    """Return a name that plotly shows as it is: it reads labels as HTML."""
    return escape(text, quote=False)


def shorten(text: str) -> str:
    """Return a name for an axis, its middle left out where it is long; escaped."""
    half = MAX_NAME // 2
    return named(text if len(text) <= MAX_NAME else f"{text[:half]}…{text[-half:]}")


def rgba(colour: str, alpha: float) -> str:
    """Return "#rrggbb" with an opacity."""
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},{alpha})"
