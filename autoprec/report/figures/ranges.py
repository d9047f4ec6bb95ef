"""Exponents of what flows through the model, against what FP16 can hold and where the loss scale moves gradients."""

from __future__ import annotations

import math
from collections.abc import Mapping

import plotly.graph_objects as go

from autoprec.probes.ranges import FIRST_OVERFLOWING, LAST_FLUSHED, ExponentHistogram
from autoprec.profiling.profile import Profile
from autoprec.report.figures.style import SERIES, named, new_figure, shorten
from autoprec.report.saved_search import SavedSearch

__all__ = ["activations_by_unit", "all_exponents", "gradients_by_unit", "loss_scale"]

FIRST_SUBNORMAL = -15
"""Exponent of the largest magnitudes that FP16 holds with fewer than 11 bits."""
MARGIN = 2
OCTAVES = {"title": "octave, by its smallest magnitude", "tickprefix": "2<sup>", "ticksuffix": "</sup>"}


def loss_scale(search: SavedSearch) -> tuple[float, str]:
    """Return a loss scale and where it comes from: the policy's, where a run with a scaler ended, or torch's."""
    scaler = search.policy.grad_scaler
    if search.policy.needs_grad_scaler and scaler is not None:
        return scaler.init_scale, "the recommended policy's initial scale"
    for name, outcome in search.outcomes.items():
        if outcome.scale_history and outcome.scale_history[-1] > 0:
            return outcome.scale_history[-1], f"where the scale of {name} ended"
    return 65536.0, "torch's default"


def all_exponents(search: SavedSearch) -> go.Figure | None:
    """Return the share of all activations and gradients in each octave, with and without the loss scale."""
    if search.profile is None or not search.profile.units:
        return None
    scale, _ = loss_scale(search)
    activations = ExponentHistogram()
    for unit in search.profile.units.values():
        activations = activations + unit.activations
    gradients = search.profile.gradients
    shift = math.floor(math.log2(scale))
    lines = [
        ("activations", activations, 0, SERIES[0], "solid"),
        ("gradients", gradients, 0, SERIES[1], "dot"),
        (f"gradients times {scale:g}", gradients, shift, SERIES[1], "solid"),
    ]
    figure = new_figure()
    for name, histogram, moved, colour, dash in lines:
        total = max(1, histogram.num_values)
        exponents = sorted(histogram.counts)
        figure.add_scatter(
            x=[exponent + moved for exponent in exponents],
            y=[histogram.counts[exponent] / total for exponent in exponents],
            mode="lines",
            name=named(name),
            line={"color": colour, "dash": dash, "shape": "hvh", "width": 2},
            hovertemplate="2^%{x}: %{y:.2%}",
        )
    low, high = _span([(activations, 0), (gradients, 0), (gradients, shift)])
    _shade(figure, low, high)
    figure.update_xaxes(range=[low, high], **OCTAVES)
    figure.update_yaxes(title="share of the values", tickformat=".0%", rangemode="tozero")
    return figure


def activations_by_unit(search: SavedSearch) -> go.Figure | None:
    """Return each unit's activations by octave."""
    if search.profile is None or not search.profile.units:
        return None
    return _by_unit(search.profile, {n: u.activations for n, u in search.profile.units.items()}, shift=0)


def gradients_by_unit(search: SavedSearch) -> go.Figure | None:
    """Return the gradients of each unit's activations by octave, times the loss scale."""
    if search.profile is None or not search.profile.units:
        return None
    shift = math.floor(math.log2(loss_scale(search)[0]))
    return _by_unit(search.profile, {n: u.activation_gradients for n, u in search.profile.units.items()}, shift=shift)


def _by_unit(profile: Profile, histograms: Mapping[str, ExponentHistogram], *, shift: int) -> go.Figure | None:
    if not any(histogram.counts for histogram in histograms.values()):
        return None
    low, high = _span([(histogram, shift) for histogram in histograms.values()])
    exponents = list(range(low, high + 1))
    shares = [
        [histogram.counts.get(exponent - shift, 0) / max(1, histogram.num_values) for exponent in exponents]
        for histogram in histograms.values()
    ]
    figure = new_figure(height=max(260, min(900, 130 + 11 * len(histograms))))
    figure.add_heatmap(
        z=[[math.log10(share) if share else None for share in row] for row in shares],
        x=exponents,
        y=list(range(len(histograms))),
        text=[[f"{named(name)}: {share:.2%}" for share in row] for name, row in zip(histograms, shares, strict=True)],
        hovertemplate="%{text} at 2^%{x}<extra></extra>",
        colorscale=[[0, "rgba(0,144,217,0.12)"], [1, "#0090d9"]],
        zmin=-4,
        zmax=0,
        showscale=False,
    )
    _shade(figure, low, high, labelled=False)
    names = list(histograms)
    every = max(1, len(names) // 40)
    figure.update_xaxes(range=[low, high], **OCTAVES)
    figure.update_yaxes(
        autorange="reversed",
        tickvals=list(range(0, len(names), every)),
        ticktext=[shorten(name) for name in names[::every]],
        tickfont={"size": 10},
        showgrid=False,
    )
    return figure


def _span(shown: list[tuple[ExponentHistogram, int]]) -> tuple[int, int]:
    """Return the octaves to show: all that have values, FP16's among them."""
    exponents = [exponent + shift for histogram, shift in shown for exponent in histogram.counts]
    return min([LAST_FLUSHED, *exponents]) - MARGIN, max([FIRST_OVERFLOWING, *exponents]) + MARGIN


def _shade(figure: go.Figure, low: int, high: int, *, labelled: bool = True) -> None:
    """Mark what FP16 flushes to 0, holds with fewer bits, and cannot hold."""
    bands = [
        (low, LAST_FLUSHED + 0.5, "rgba(200,60,60,0.16)", "0 in FP16"),
        (LAST_FLUSHED + 0.5, FIRST_SUBNORMAL + 0.5, "rgba(220,160,40,0.14)", "fewer bits"),
        (FIRST_OVERFLOWING - 0.5, high, "rgba(200,60,60,0.16)", "overflow"),
    ]
    for start, end, colour, text in bands:
        figure.add_vrect(
            x0=start,
            x1=end,
            fillcolor=colour,
            line_width=0,
            layer="below",
            annotation={"text": text if labelled else "", "font": {"size": 10}},
            annotation_position="top left" if start == low else "top right" if end == high else "top",
        )
