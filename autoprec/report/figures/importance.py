"""Which parameters of the study decided its objectives."""

from __future__ import annotations

from functools import partial

import plotly.graph_objects as go
from optuna.importance import FanovaImportanceEvaluator, get_param_importances
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

from autoprec.report.figures.style import SERIES, new_figure, shorten

__all__ = ["MIN_TRIALS", "parameter_importance"]

MIN_TRIALS = 4
TOP = 12
TREES = 16


def parameter_importance(study: Study) -> go.Figure | None:
    """Return the share of each objective's variance that the parameters explain (fANOVA), the largest `TOP`.

    None where fewer than `MIN_TRIALS` trials finished or no objective varied.
    """
    finished = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    names = study.metric_names or [f"objective {k}" for k in range(len(study.directions))]
    found: dict[str, dict[str, float]] = {}
    for place, name in enumerate(names):
        if len(finished) < MIN_TRIALS or len({trial.values[place] for trial in finished}) < 2:
            continue
        found[name] = get_param_importances(
            study,
            evaluator=FanovaImportanceEvaluator(n_trees=TREES, max_depth=TREES, seed=0),
            target=partial(_value, place=place),
        )
    if not found:
        return None
    shown = sorted(
        {name for shares in found.values() for name in shares},
        key=lambda n: -max(s.get(n, 0.0) for s in found.values()),
    )[:TOP]
    figure = new_figure(height=170 + 14 * len(found) * len(shown), barmode="group", bargap=0.25)
    for place, (objective, shares) in enumerate(found.items()):
        figure.add_bar(
            x=[shares.get(name, 0.0) for name in shown],
            y=[shorten(name) for name in shown],
            orientation="h",
            name=objective,
            marker={"color": SERIES[place], "line": {"width": 0}},
            hovertemplate="%{x:.1%}",
        )
    figure.update_xaxes(title="share of the variance", tickformat=".0%")
    figure.update_yaxes(autorange="reversed", showgrid=False)
    return figure


def _value(trial: FrozenTrial, *, place: int) -> float:
    return float(trial.values[place])
