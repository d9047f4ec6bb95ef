"""What a search tells its caller while it runs; every method may be left empty."""

from __future__ import annotations

from collections.abc import Sequence

from autoprec.policy import Policy
from autoprec.profiling.profile import Profile
from autoprec.search.study import TrialRecord
from autoprec.trials.outcome import Outcome

__all__ = ["Events"]


class Events:
    """Receive the progress of a search. The defaults ignore all of it; a front end overrides what it shows."""

    def note(self, text: str) -> None:
        """Hear one sentence about something that was skipped, resumed or changed."""

    def profile_taken(self, profile: Profile) -> None:
        """Hear that the profile was taken, not loaded."""

    def resumed(self, records: Sequence[TrialRecord]) -> None:
        """Hear of the trials that the study held before this search began."""

    def trial_started(self, number: int, label: str, policy: Policy) -> None:
        """Hear that trial `number` starts; `label` is the arm's name or "sampled"."""

    def trial_finished(self, record: TrialRecord, *, num_finished: int, n_trials: int) -> None:
        """Hear that a trial finished."""

    def verification_planned(self, num_runs: int, num_done: int, num_steps: int) -> None:
        """Hear how many runs the next look of the proof needs in all, and how many of these the study already holds."""

    def verification_finished(self, arm: str, seed: int, outcome: Outcome) -> None:
        """Hear that one run of the proof finished."""
