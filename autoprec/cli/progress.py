"""Progress of a search: a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

from rich.console import Console
from rich.status import Status

from autoprec.report.escaping import escaped
from autoprec.report.quantities import show_accuracy, show_bytes, show_duration, show_throughput
from autoprec.search.arms import FP32
from autoprec.search.events import Events
from autoprec.search.metric import Metric, metric_of
from autoprec.search.worth import Candidate, best

if TYPE_CHECKING:
    from autoprec.policy import Policy
    from autoprec.profiling.profile import Profile
    from autoprec.search.plan import SearchPlan
    from autoprec.search.study import TrialRecord
    from autoprec.search.verification import Verification
    from autoprec.trials.outcome import Outcome

__all__ = ["ProofProgress", "Progress", "TrialLines", "forecast", "print_margin", "show_shares", "time_shares"]


class ProofProgress(Events):
    """Print what a proof does; a context, so that the live line is always taken away."""

    def __init__(self, console: Console, metric: Metric | None = None) -> None:
        self._console = console
        self._metric = metric or Metric()
        self._status: Status | None = console.status("starting") if console.is_terminal else None
        self._num_runs = 0
        self._num_done = 0
        self._started = time.monotonic()

    def __enter__(self) -> Self:
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._status is not None:
            self._status.stop()

    def note(self, text: str) -> None:
        self._line(text)

    def verification_planned(self, num_runs: int, num_done: int, num_steps: int) -> None:
        self._num_runs, self._num_done = num_runs, num_done
        if num_done < num_runs:
            self._line(f"proof: {num_runs} runs of {num_steps} steps on unused seeds, {num_done} of them made before")

    def verification_finished(self, arm: str, seed: int, outcome: Outcome) -> None:
        self._num_done += 1
        self._line(
            f"[proof {self._num_done}/{self._num_runs}] {arm}, seed {seed}: {_show_metric(outcome, self._metric)}"
        )

    def _line(self, text: str) -> None:
        self._console.print(escaped(text), soft_wrap=True)


class TrialLines(Events):
    """Print a line for each trial that finishes, whoever runs it, and the notes."""

    def __init__(self, console: Console, metric: Metric | None = None) -> None:
        self._console, self._metric = console, metric or Metric()

    def note(self, text: str) -> None:
        self._console.print(escaped(text), soft_wrap=True)

    def trial_finished(self, record: TrialRecord, *, num_finished: int, n_trials: int) -> None:
        self.note(f"[{num_finished}/{n_trials}] {_show_trial(record, self._metric)}")


class Progress(ProofProgress):
    """Print what a search does, its trials above all."""

    def __init__(self, console: Console, plan: SearchPlan) -> None:
        super().__init__(console, metric_of(plan.task))
        self._plan = plan
        self._candidates: list[Candidate] = []
        self._seconds: defaultdict[str, float] = defaultdict(float)

    def profile_taken(self, profile: Profile) -> None:
        self._seconds["profile"] += profile.wall_seconds * self._plan.num_workers  # nothing else runs beside it

    def verification_finished(self, arm: str, seed: int, outcome: Outcome) -> None:
        self._add_phases(outcome)
        super().verification_finished(arm, seed, outcome)

    def _add_phases(self, outcome: Outcome) -> None:
        for phase, seconds in outcome.phase_seconds.items():
            self._seconds[phase] += seconds

    def shares(self, wall_seconds: float) -> dict[str, float]:
        """Return what each phase took of the time that the workers had in `wall_seconds`, and the `rest`."""
        return time_shares(self._seconds, wall_seconds=wall_seconds, num_workers=self._plan.num_workers)

    def resumed(self, records: Sequence[TrialRecord]) -> None:
        self._candidates = [_candidate(record) for record in records if record.is_feasible and not record.is_cached]
        if records:
            num_finished = sum(not record.is_cached for record in records)
            self._line(f"the study holds {num_finished} finished trials; best so far {self._best()}")

    def trial_started(self, number: int, label: str, policy: Policy) -> None:
        self._live(f"trial {number}: {label}")

    def trial_finished(self, record: TrialRecord, *, num_finished: int, n_trials: int) -> None:
        outcome = record.outcome
        self._add_phases(outcome)
        self._candidates += [_candidate(record)] if record.is_feasible else []
        self._line(f"[{num_finished}/{n_trials}] {_show_trial(record, self._metric)}; best so far {self._best()}")
        if record.arm == FP32:
            left = n_trials - num_finished
            self._line(f"time: {forecast(self._plan, num_trials=left, trial_seconds=outcome.wall_seconds)} from here")

    def _best(self) -> str:
        reference = next((c for c in self._candidates if c.name == FP32), None)
        if reference is None:
            return "-"
        return best(self._candidates, reference, self._plan.settings.prefer, self._plan.worth).name

    def _live(self, text: str) -> None:
        if self._status is not None:
            elapsed = show_duration(time.monotonic() - self._started)
            self._status.update(escaped(f"{text} ({elapsed}; best so far {self._best()})"))


def _show_metric(outcome: Outcome, metric: Metric) -> str:
    if outcome.accuracy is None:
        return outcome.kind
    return f"{metric.name} {show_accuracy(metric.own(outcome.accuracy))}"


def _show_trial(record: TrialRecord, metric: Metric) -> str:
    outcome = record.outcome
    numbers = (
        f"{show_bytes(outcome.peak_memory_bytes)}, {show_throughput(outcome.throughput_samples_per_second)}, "
        f"{_show_metric(outcome, metric)}"
        if outcome.is_ok
        else f"{outcome.kind}: {outcome.message}"[:160]
    )
    return f"{record.label}{'' if record.is_feasible else ' (infeasible)'}: {numbers}"


def time_shares(seconds: Mapping[str, float], *, wall_seconds: float, num_workers: int) -> dict[str, float]:
    """Return the share of each phase in the time of all workers, and of the `rest`: start-up, sampler, files, idle."""
    whole = max(wall_seconds * num_workers, 1e-9)
    shares = {phase: seconds.get(phase, 0.0) / whole for phase in ("training", "evaluation", "profile", "target")}
    return {**shares, "rest": max(0.0, 1.0 - math.fsum(shares.values()))}


def show_shares(shares: Mapping[str, float], wall_seconds: float) -> str:
    """Say where the time of a search went, measured here."""
    names = {"target": "estimates of the target", "rest": "all else"}
    parts = (f"{names.get(phase, phase)} {share:.1%}" for phase, share in shares.items())
    return f"time here {show_duration(wall_seconds)}: {', '.join(parts)}"


def _candidate(record: TrialRecord) -> Candidate:
    return Candidate(record.label, record.policy, record.key, record.outcome)


def print_margin(console: Console, verification: Verification) -> None:
    """Print the margin beside what the proof could show, and the noise of FP32 against itself where it was run."""
    provable, noise, margin = verification.provable_margin, verification.noise, verification.margin
    share = "" if verification.proof.margin is not None else f", {verification.proof.max_lost_share:.0%} of FP32's gain"
    parts = ["no margin" if margin is None else f"margin {margin:.4g} of {verification.metric.name}{share}"]
    parts += [] if provable is None else [f"the smallest margin this proof could show is {provable:.4f}"]
    parts += [] if noise is None else [f"FP32 against itself differs by {noise:.4f} (standard deviation)"]
    if len(parts) > 1:
        console.print(escaped("; ".join(parts)), soft_wrap=True)


def forecast(plan: SearchPlan, *, num_trials: int | None = None, trial_seconds: float | None = None) -> str:
    """Say how long the trials and the proof will take, from the FP32 step timed before or a trial that was run."""
    one = plan.trial_seconds if trial_seconds is None else trial_seconds / plan.num_workers
    trials = one * (plan.settings.n_trials if num_trials is None else num_trials)
    low, high = (show_duration(seconds) for seconds in plan.proof_seconds(one))
    return f"about {show_duration(trials)} for the trials, then {low} to {high} for the proof"
