"""The front with its baselines, and the proof of each arm against the margin."""

from __future__ import annotations

import plotly.graph_objects as go

from autoprec.report.figures.style import SERIES, arm_colours, byte_unit, named, new_figure, shorten
from autoprec.report.quantities import show_bytes, show_throughput
from autoprec.report.saved_search import SavedSearch, SavedTrial
from autoprec.search.arms import BASELINES
from autoprec.search.metric import Metric

__all__ = ["accuracy_by_memory", "accuracy_by_throughput", "proof_differences"]


def accuracy_by_memory(search: SavedSearch) -> go.Figure:
    """Return the trials that trained, by peak memory and accuracy."""
    known = [m.numbers["peak_memory_bytes"].value for m in search.members if "peak_memory_bytes" in m.numbers]
    size, unit = byte_unit(max(known, default=0.0))
    title = f"peak memory, {unit} ({_kind(search, 'peak_memory_bytes')})"
    return _trials(search, "peak_memory_bytes", scale=size, title=title)


def accuracy_by_throughput(search: SavedSearch) -> go.Figure:
    """Return the trials that trained, by throughput (samples per second) and accuracy."""
    kind = _kind(search, "throughput_samples_per_second")
    return _trials(search, "throughput_samples_per_second", scale=1, title=f"samples per second ({kind})")


def _kind(search: SavedSearch, field: str) -> str:
    """Return where the numbers of a field come from."""
    kinds = {number.kind for m in search.members if (number := m.numbers.get(field)) is not None}
    return ", ".join(sorted(kinds)) or "unknown"


def _trials(search: SavedSearch, field: str, *, scale: float, title: str) -> go.Figure:
    figure = new_figure()
    on_front = {member.name for member in search.members if member.on_front}
    shown = [t for t in search.trials if t.was_run and t.end == "ok" and t.outcome and getattr(t.outcome, field)]
    groups = {
        "infeasible": [t for t in shown if not t.is_feasible],
        "feasible": [t for t in shown if t.is_feasible and t.label not in on_front and t.arm not in BASELINES],
        "on the front": [t for t in shown if t.is_feasible and t.label in on_front and t.arm not in BASELINES],
    }
    looks = {
        "infeasible": ("x-thin", SERIES[1]),
        "feasible": ("circle-open", SERIES[0]),
        "on the front": ("circle", SERIES[0]),
    }
    for name, trials in groups.items():
        symbol, colour = looks[name]
        _add(figure, trials, field, scale, search.front.metric, name=name, symbol=symbol, colour=colour, size=10)
    colours = arm_colours(BASELINES)
    for trial in (t for t in shown if t.arm in BASELINES):
        _add(
            figure,
            [trial],
            field,
            scale,
            search.front.metric,
            name=trial.arm,
            symbol="diamond",
            colour=colours[trial.arm],
            size=13,
        )
    recommended = [t for t in shown if t.label == search.front.recommended]
    _add(
        figure,
        recommended,
        field,
        scale,
        search.front.metric,
        name="recommended",
        symbol="circle-open",
        colour=SERIES[2],
        size=22,
    )
    figure.update_xaxes(title=title, rangemode="normal")
    figure.update_yaxes(title=named(f"{search.front.metric.name} of the trial"))
    return figure


def _add(
    figure: go.Figure,
    trials: list[SavedTrial],
    field: str,
    scale: float,
    metric: Metric,
    *,
    name: str,
    symbol: str,
    colour: str,
    size: int,
) -> None:
    points = [t for t in trials if t.outcome is not None and t.outcome.accuracy is not None]
    if not points:
        return
    figure.add_scatter(
        x=[getattr(t.outcome, field).value / scale for t in points],
        y=[metric.own(t.outcome.accuracy).value for t in points],  # type: ignore[union-attr,arg-type]
        mode="markers",
        name=named(name),
        text=[_hover(t, metric) for t in points],
        hovertemplate="%{text}<extra></extra>",
        marker={"symbol": symbol, "size": size, "color": colour, "line": {"width": 2, "color": colour}},
    )


def _hover(trial: SavedTrial, metric: Metric) -> str:
    outcome = trial.outcome
    assert outcome is not None
    assert outcome.accuracy is not None
    memory, speed = show_bytes(outcome.peak_memory_bytes), show_throughput(outcome.throughput_samples_per_second)
    own = metric.own(outcome.accuracy)
    return f"{named(trial.label)}<br>{memory}, {speed}<br>{named(metric.name)} {own.value:.4f} ({own.kind})"


def proof_differences(search: SavedSearch) -> go.Figure | None:
    """Return each arm's mean difference of the metric to FP32 with its bound, beside the margin."""
    arms = [(m.name, m.proof, m.proof.accuracy_difference) for m in search.members if m.proof is not None]
    known = [(name, proof, difference) for name, proof, difference in arms if difference is not None]
    if not known:
        return None
    colours = arm_colours(search.outcomes)
    figure = new_figure(height=150 + 34 * len(known), showlegend=False)
    figure.add_scatter(
        x=[difference.mean for _, _, difference in known],
        y=[shorten(name) for name, _, _ in known],
        error_x={
            "array": [difference.half_width for _, _, difference in known],
            "thickness": 2,
            "width": 6,
            "color": "#888",
        },
        mode="markers",
        marker={"size": 11, "color": [colours.get(name, SERIES[0]) for name, _, _ in known]},
        text=[
            f"{named(name)}: {proof.verdict}<br>{difference.mean:+.4f} ± {difference.half_width:.4f}, "
            f"{difference.num_seeds} seeds"
            for name, proof, difference in known
        ],
        hovertemplate="%{text}<extra></extra>",
    )
    margin = search.front.margin
    if margin is not None:
        text = f"margin -{margin:.3g}"
        figure.add_vline(x=-margin, line={"dash": "dash", "color": SERIES[1]}, annotation_text=text)
    figure.add_vline(x=0, line={"width": 1, "color": "#888"})
    figure.update_xaxes(title="difference of the metric to FP32, paired seeds; right is better")
    figure.update_yaxes(autorange="reversed")
    return figure
