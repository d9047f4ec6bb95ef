"""Numbers as people read them: units, ratios and where they come from."""

from __future__ import annotations

from autoprec.policy import Number

__all__ = ["show_bytes", "show_throughput", "show_accuracy", "show_ratio", "show_ratio_number", "show_duration"]


def show_bytes(number: Number | None) -> str:
    if number is None:
        return "-"
    gib = number.value / 2**30
    return f"{gib:.2f} GiB" if gib >= 0.1 else f"{number.value / 2**20:.1f} MiB"


def show_throughput(number: Number | None) -> str:
    if number is None:
        return "-"
    return f"{number.value:,.0f}/s" if number.value >= 100 else f"{number.value:.2f}/s"


def show_accuracy(number: Number | None) -> str:
    return "-" if number is None else f"{number.value:.4f}"


def show_ratio(number: Number | None, reference: Number | None) -> str:
    """Return "0.53x", or "" where one of the two is missing or the reference is not above 0."""
    if number is None or reference is None or reference.value <= 0:
        return ""
    return f"{number.value / reference.value:.2f}x"


def show_ratio_number(ratio: Number | None) -> str:
    """Return "0.53x", with its interval where it has one, or "" where there is none."""
    if ratio is None:
        return ""
    interval = "" if ratio.low is None or ratio.high is None else f" ({ratio.low:.2f} to {ratio.high:.2f})"
    return f"{ratio.value:.2f}x{interval}"


def show_duration(seconds: float) -> str:
    """Return "40 s", "4 min" or "1.5 h"."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{round(seconds / 60)} min" if seconds < 90 * 60 else f"{seconds / 3600:.1f} h"
