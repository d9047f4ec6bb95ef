"""One HTML file that says why: all that a search left, with figures; it asks the network nothing.

Names, reasons and messages are text wherever they stand: escaped in the page by jinja2, in figures for plotly, and in
the figures' JSON so that nothing closes its element. A content security policy in the page allows its two scripts, by
their hash, and no request.
"""

from __future__ import annotations

import base64
import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jinja2
import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from autoprec.policy import Policy, write_atomically
from autoprec.report.figures import costs, front, importance, model_map, ranges, training
from autoprec.report.quantities import show_accuracy, show_bytes, show_duration, show_ratio_number, show_throughput
from autoprec.report.saved_search import SavedSearch

__all__ = ["ReportFigure", "report_figures", "report_html", "write_report"]

TEMPLATES = Path(__file__).parent / "templates"
ESCAPES = {ord(character): f"\\u{ord(character):04x}" for character in "<>&\u2028\u2029"}


@dataclass(frozen=True, slots=True)
class ReportFigure:
    """One place for a figure. `missing` says why there is none where `figure` is None."""

    name: str
    section: str
    title: str
    caption: str
    figure: go.Figure | None
    missing: str


def write_report(search: SavedSearch, path: Path) -> int:
    """Write the report of a search to `path`, whole or not at all, and return its size in bytes."""
    text = report_html(search)
    write_atomically(path, text)
    return len(text.encode())


def report_html(search: SavedSearch) -> str:
    """Return the report of a search as one HTML page."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    figures = report_figures(search)
    scripts = {"plotly": get_plotlyjs(), "page": (TEMPLATES / "report.js").read_text(encoding="utf-8")}
    return environment.get_template("report.html.j2").render(
        search=search,
        front=search.front,
        policy=search.policy,
        figures={section: [f for f in figures if f.section == section] for section in {f.section for f in figures}},
        figures_json=_as_json(figures),
        style=(TEMPLATES / "report.css").read_text(encoding="utf-8"),
        scripts=scripts,
        hashes=[_hash(script) for script in scripts.values()],
        num_run=sum(trial.was_run for trial in search.trials),
        units=_unit_rows(search),
        show=_SHOWN,
    )


def report_figures(search: SavedSearch) -> list[ReportFigure]:
    """Return all figures of a report, in its order."""
    return [
        *_front_figures(search),
        *_map_figures(search),
        *_range_figures(search),
        *_training_figures(search),
        *_cost_figures(search),
    ]


def _front_figures(search: SavedSearch) -> Iterator[ReportFigure]:
    kinds = "Accuracy is that of short trials; only the proof below compares it fairly."
    place = partial(ReportFigure, section="front")
    none = "No trial gave numbers."
    yield place(
        "front-memory",
        title="Memory and accuracy",
        caption=f"Left and high is better. {kinds}",
        figure=front.accuracy_by_memory(search),
        missing=none,
    )
    yield place(
        "front-throughput",
        title="Throughput and accuracy",
        caption=f"Right and high is better. {kinds}",
        figure=front.accuracy_by_throughput(search),
        missing=none,
    )
    proof = search.front.proof
    yield ReportFigure(
        "proof",
        "proof",
        "Difference to FP32, arm by arm",
        f"Mean over paired seeds that no trial used, {proof.num_steps} steps each; bars are one-sided bounds at the "
        "level at which the arm could be proved. The margin drawn is that of FP32's mean gain; the verdict pairs it by "
        "seed.",
        front.proof_differences(search),
        "No arm was compared with FP32 in a proof.",
    )


def _map_figures(search: SavedSearch) -> Iterator[ReportFigure]:
    none = "Neither a profile nor evidence for units was kept."
    size = "in equal tiles" if search.profile is None else "each as large as its part of FP32's peak memory (computed)"
    yield ReportFigure(
        "map-precision",
        "map",
        "Precision",
        f"The recommended policy: {search.front.recommended}. Units {size}.",
        model_map.precision_map(search),
        none,
    )
    yield ReportFigure(
        "map-sensitivity",
        "map",
        f"Sensitivity to {search.policy.dtype.upper()}",
        "How far the loss moves, relative to itself, where this unit alone computes in half, as the profile saw it "
        "(measured here, on real batches). Tiles that hold others show the most sensitive of them.",
        model_map.sensitivity_map(search),
        "No profile was kept.",
    )
    yield ReportFigure(
        "map-policies",
        "map",
        "Every policy of the front",
        "One row a policy, one column a unit.",
        model_map.precision_strips(search),
        none,
    )


def _range_figures(search: SavedSearch) -> Iterator[ReportFigure]:
    scale, source = ranges.loss_scale(search)
    none = "No profile was kept."
    fp16 = "FP16 holds 2^-24 to 65504; below 2^-25 all is 0, below 2^-14 it has fewer bits."
    yield ReportFigure(
        "exponents",
        "ranges",
        "All values",
        f"Measured in FP32 steps of the profile. {fp16} Gradients are moved by the loss scale {scale:g}: {source}.",
        ranges.all_exponents(search),
        none,
    )
    yield ReportFigure(
        "exponents-activations",
        "ranges",
        "Activations of each unit",
        "Units in the order of their calls, from the top; darker is a larger share of the values.",
        ranges.activations_by_unit(search),
        none,
    )
    yield ReportFigure(
        "exponents-gradients",
        "ranges",
        f"Gradients of each unit, times {scale:g}",
        "Gradients of the units' outputs, as the loss scale moves them.",
        ranges.gradients_by_unit(search),
        none,
    )


def _training_figures(search: SavedSearch) -> Iterator[ReportFigure]:
    none = "No arm was trained in a proof."
    yield ReportFigure(
        "loss-curves",
        "training",
        "Training loss in the proof",
        "Mean over the seeds; bands reach from the lowest seed to the highest. All arms see the same batches.",
        training.loss_curves(search),
        none,
    )
    yield ReportFigure(
        "loss-differences",
        "training",
        "Training loss less FP32's, seed by seed",
        "What is left when the noise that both share is gone. Above 0 the arm trains worse.",
        training.loss_differences(search),
        "No arm was trained beside FP32.",
    )
    yield ReportFigure(
        "scale-history",
        "training",
        "Loss scale",
        "The scale of each arm that has a grad scaler, in its trial; crosses are steps that were skipped.",
        training.scale_history(search),
        "No arm used a grad scaler.",
    )


def _cost_figures(search: SavedSearch) -> Iterator[ReportFigure]:
    target = f"At the target shape on {search.front.target}"
    yield ReportFigure(
        "memory",
        "costs",
        "Memory at the peak, by category",
        f"{target}; FP32 first, then the recommendation.",
        costs.memory_by_category(search),
        "No trial gave memory by category.",
    )
    yield ReportFigure(
        "time",
        "costs",
        "Where the time of a step goes",
        f"{target}: predicted, every unit in the same precision, then as recommended.",
        costs.time_by_part(search),
        "No profile with times was kept.",
    )
    yield ReportFigure(
        "importance",
        "importance",
        "Parameters that decided",
        "Share of each objective's variance over the trials (fANOVA). With few trials this is a rough picture.",
        importance.parameter_importance(search.study),
        f"Fewer than {importance.MIN_TRIALS} trials finished, or all gave the same.",
    )


def _as_json(figures: Sequence[ReportFigure]) -> str:
    """Return figure name -> plotly figure as JSON that may stand inside a script element."""
    members = [f'"{figure.name}":{figure.figure.to_json()}' for figure in figures if figure.figure is not None]
    return ("{" + ",".join(members) + "}").translate(ESCAPES)


def _hash(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _unit_rows(search: SavedSearch) -> list[dict[str, Any]]:
    precisions = search.precisions(search.policy)
    evidence = {} if search.policy.evidence is None else search.policy.evidence.units
    profiles = {} if search.profile is None else search.profile.units
    scale, _ = ranges.loss_scale(search)
    rows = []
    for unit in search.units:
        seen = profiles.get(unit)
        rows.append(
            {
                "name": unit,
                "precision": precisions[unit],
                "reason": evidence[unit].reason if unit in evidence else "",
                "headroom": "-" if seen is None or seen.headroom_octaves is None else f"{seen.headroom_octaves:.1f}",
                "flushed": "-" if seen is None else f"{seen.flushed_share(scale):.2%}",
                "score": "-" if seen is None else f"{seen.error_score(search.policy.dtype):.2g}",
            }
        )
    return rows


def _shown_policy(policy: Policy | None) -> str:
    if policy is None:
        return "-"
    dtype = f" ({policy.dtype})" if policy.default == "autocast" else ""
    counts = Counter(policy.modules.values())
    return ", ".join(
        [f"{policy.default}{dtype}", *(f"{number} in {precision}" for precision, number in counts.items())]
    )


_SHOWN = {
    "bytes": show_bytes,
    "throughput": show_throughput,
    "accuracy": show_accuracy,
    "ratio": show_ratio_number,
    "duration": show_duration,
    "policy": _shown_policy,
}
