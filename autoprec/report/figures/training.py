"""How the arms trained: loss curves beside FP32's, and the loss scale with the steps that it skipped."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

import plotly.graph_objects as go

from autoprec.report.figures.style import arm_colours, named, new_figure, rgba
from autoprec.report.saved_search import SavedSearch
from autoprec.search.arms import FP32
from autoprec.trials.outcome import Outcome

__all__ = ["loss_curves", "loss_differences", "scale_history"]

Curves = list[list[float]]
"""One a seed, one value a step."""


def loss_curves(search: SavedSearch) -> go.Figure | None:
    """Return the training loss of each arm of the proof: the mean over the seeds, and a band from lowest to highest."""
    curves = {arm: _curves(search.runs[arm]) for arm in _proved(search)}
    figure = _banded({arm: found for arm, found in curves.items() if found})
    if figure is not None:
        figure.update_yaxes(title="training loss")
    return figure


def loss_differences(search: SavedSearch) -> go.Figure | None:
    """Return each arm's training loss less FP32's on the same seed: mean, and a band from lowest to highest."""
    reference = search.runs.get(FP32, {})
    curves: dict[str, Curves] = {}
    for arm in _proved(search):
        pairs = [(run, reference[seed]) for seed, run in search.runs[arm].items() if arm != FP32 and seed in reference]
        found = [
            [own - fp32 for own, fp32 in zip(run.train_losses, other.train_losses, strict=False)]
            for run, other in pairs
        ]
        curves[arm] = [curve for curve in found if curve]
    figure = _banded({arm: found for arm, found in curves.items() if found})
    if figure is not None:
        figure.add_hline(y=0, line={"width": 1, "color": "#888"})
        figure.update_yaxes(title="training loss less FP32's")
    return figure


def scale_history(search: SavedSearch) -> go.Figure | None:
    """Return the loss scale at each step of each arm with a scaler, its skipped steps marked."""
    arms = {name: outcome for name, outcome in search.outcomes.items() if outcome.scale_history}
    if not arms:
        return None
    colours = arm_colours(search.outcomes)
    figure = new_figure()
    for name, outcome in arms.items():
        octaves = [math.log2(scale) if scale > 0 else None for scale in outcome.scale_history]
        skipped = [k for k, norm in enumerate(outcome.grad_norms[: len(octaves)]) if norm is None]
        figure.add_scatter(
            x=list(range(1, len(octaves) + 1)),
            y=octaves,
            mode="lines",
            name=named(name),
            line={"color": colours[name], "shape": "hv", "width": 2},
            customdata=outcome.scale_history,
            hovertemplate="step %{x}: %{customdata:,.6g}",
        )
        figure.add_scatter(
            x=[k + 1 for k in skipped],
            y=[octaves[k] for k in skipped],
            mode="markers",
            name=named(f"{name}, skipped"),
            showlegend=False,
            hovertemplate="step %{x} skipped",
            marker={"symbol": "x", "size": 7, "color": colours[name]},
        )
    figure.update_xaxes(title="step of the trial")
    figure.update_yaxes(title="loss scale", tickformat="d", tickprefix="2<sup>", ticksuffix="</sup>")
    return figure


def _proved(search: SavedSearch) -> list[str]:
    """Return the arms of the proof that the front knows, FP32 first."""
    known = [member.name for member in search.members]
    return sorted((arm for arm in search.runs if arm in known), key=known.index)


def _curves(runs: Mapping[int, Outcome]) -> Curves:
    return [run.train_losses for run in runs.values() if run.train_losses]


def _banded(curves: Mapping[str, Curves]) -> go.Figure | None:
    if not curves:
        return None
    colours = arm_colours(curves)
    figure = new_figure()
    for arm, seeds in curves.items():
        columns = list(_by_step(seeds))
        steps = list(range(1, len(columns) + 1))
        figure.add_scatter(
            x=steps + steps[::-1],
            y=[max(column) for column in columns] + [min(column) for column in columns][::-1],
            fill="toself",
            fillcolor=rgba(colours[arm], 0.15),
            line={"width": 0},
            mode="lines",
            hoverinfo="skip",
            showlegend=False,
            legendgroup=named(arm),
        )
        figure.add_scatter(
            x=steps,
            y=[statistics.fmean(column) for column in columns],
            mode="lines",
            name=named(f"{arm}, {len(seeds)} seeds"),
            legendgroup=named(arm),
            line={"color": colours[arm], "width": 2},
            hovertemplate="step %{x}: %{y:.4f}",
        )
    figure.update_xaxes(title="step of the proof")
    return figure


def _by_step(seeds: Curves) -> Sequence[Sequence[float]]:
    """Return the values of all seeds at each step; a run that ended early is missing from the later ones."""
    longest = max(len(seed) for seed in seeds)
    return [[seed[k] for seed in seeds if k < len(seed)] for k in range(longest)]
