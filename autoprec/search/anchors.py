"""Stock autocast timed beside a worker's trials: what makes times of several devices of one kind comparable."""

from __future__ import annotations

import statistics
from collections.abc import Iterable

from autoprec.policy import Number, Policy
from autoprec.search.arms import AUTOCAST_FP16, BASELINES
from autoprec.search.events import Events
from autoprec.search.lookahead import Measure
from autoprec.search.study import TrialRecord
from autoprec.trials.outcome import Outcome, TrialSettings

__all__ = ["AnchoredMeasure", "drifted_workers"]

ANCHOR_EVERY = 8
"""Trials of a worker from one timing of stock autocast to the next."""
MAX_DRIFT = 0.05
"""How far a worker's stock autocast may move before it is told: more than a card's own 1 to 2 % between repeats."""


class AnchoredMeasure:
    """A worker's measurement that times stock autocast now and then, and notes each trial's throughput relative to it.

    Args:
        measure: runs trials on one device, where throughput is measured.
        events: hears of a device that has become slower or faster since this worker began.
    """

    def __init__(self, measure: Measure, events: Events) -> None:
        self._measure = measure
        self._events = events
        self._num_trials = 0
        self._first: float | None = None
        self._last: Number | None = None

    def __call__(self, policy: Policy, settings: TrialSettings) -> Outcome:
        if self._num_trials % ANCHOR_EVERY == 0:
            self._time(settings)
        self._num_trials += 1
        outcome = self._measure(policy, settings)
        throughput = outcome.throughput_samples_per_second
        if self._last is None or throughput is None or throughput.kind != "measured":
            return outcome
        ratio = throughput.value / self._last.value
        return outcome.model_copy(update={"autocast_here": self._last, "throughput_over_autocast": ratio})

    def _time(self, settings: TrialSettings) -> None:
        outcome = self._measure(BASELINES[AUTOCAST_FP16], settings.model_copy(update={"abort": None}))
        throughput = outcome.throughput_samples_per_second
        if throughput is None or throughput.kind != "measured" or throughput.value <= 0:
            self._events.note(f"stock autocast could not be timed here ({outcome.kind} {outcome.message})".rstrip())
            return
        self._last = throughput
        if self._first is None:
            self._first = throughput.value
        drift = throughput.value / self._first - 1
        if abs(drift) > MAX_DRIFT:
            self._events.note(
                f"stock autocast runs {drift:+.1%} against the start of this worker (measured): its device has changed,"
                " and the throughput of its trials is to be read relative to it"
            )


def drifted_workers(records: Iterable[TrialRecord]) -> list[str]:
    """Return one sentence for each worker whose stock autocast is off the study's median by more than `MAX_DRIFT`."""
    anchors: dict[str, list[tuple[int, float]]] = {}
    for record in records:
        if not record.is_cached and record.outcome.autocast_here is not None:
            anchors.setdefault(record.holder, []).append((record.number, record.outcome.autocast_here.value))
    if not anchors:
        return []
    median = statistics.median(value for own in anchors.values() for _, value in own)
    told = []
    for holder, own in anchors.items():
        low, high = (extreme(value for _, value in own) / median - 1 for extreme in (min, max))
        if max(-low, high) > MAX_DRIFT:
            numbers = ", ".join(str(number) for number, value in own if abs(value / median - 1) > MAX_DRIFT)
            told.append(
                f"worker {holder}: stock autocast at {low:+.1%} to {high:+.1%} of the study's median (measured); the"
                f" throughput of its trials {numbers} compares with others only relative to it"
            )
    return told
