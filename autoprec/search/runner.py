"""The loop of a search: the arms first, then the sampler's policies, each equal policy run once."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass

import numpy as np
from optuna.trial import Trial

from autoprec.errors import StudyError, TaskError
from autoprec.policy import Policy
from autoprec.search.arms import FP32, Arm, is_stock
from autoprec.search.events import Events
from autoprec.search.lookahead import Measure, measure_ahead, num_parallel
from autoprec.search.parameters import ParameterValue
from autoprec.search.study import SearchStudy
from autoprec.trials.outcome import Outcome, TrialSettings

__all__ = ["require_reference", "run_trials"]

MAX_REPEATS = 8
"""Equal policies in a row, answered from the study without a run, after which a new policy is looked for at random."""
MAX_DRAWS = 500
"""Random policies that must all have been run before, for the space to count as exhausted."""
POLL_SECONDS = 0.5
"""Between two looks at a study whose last trials other processes run."""
MAX_LOST = 2
"""Workers that may end without a word while they run a policy, before it counts as the cause."""


def run_trials(
    study: SearchStudy,
    measure: Measure,
    *,
    arms: Sequence[Arm],
    n_trials: int,
    settings: TrialSettings,
    events: Events,
    timeout_seconds: float | None = None,
) -> None:
    """Run trials until the study holds `n_trials` finished ones or the time is over; baselines always run.

    As many run at once as the measurement allows. The sampler is asked for that many together, and again when all of
    them are told: what it proposes does not depend on which finished first.

    Other processes may take trials from the same study. What they run counts; the end is waited for, since a process
    may be lost and its trials are then to be run again.

    Raises:
        TaskError, StudyError: FP32 itself does not train, so that nothing can be compared.
    """
    run = _Runner(
        study, measure, arms, n_trials=n_trials, settings=settings, events=events, timeout_seconds=timeout_seconds
    )
    run.arms()
    run.interrupted()
    at_once = num_parallel(measure)
    repeats = study.num_cached_last // at_once * at_once  # of a search that was stopped
    while run.is_open:
        if run.arms() or run.interrupted():
            continue
        room = run.room
        if room <= 0 or study.fp32 is None:
            time.sleep(POLL_SECONDS)
            continue
        values = _unseen_values(study, seed=settings.seed) if repeats >= MAX_REPEATS else None
        if repeats >= MAX_REPEATS and values is None:
            study.mark_exhausted()
            events.note(f"the search space is exhausted: {MAX_DRAWS} random policies were all run before")
        else:
            num_asked, num_new = run.sample([values] if values else [None] * min(at_once, room))
            repeats = 0 if num_new else repeats + num_asked
    if study.num_finished < n_trials and run.is_over:
        events.note(
            f"the time given is over after {study.num_finished} of {n_trials} trials; the same command goes on where it"
            " stopped"
        )


@dataclass(frozen=True)
class _Asked:
    """A trial that the study was asked for."""

    trial: Trial
    policy: Policy
    key: str
    label: str


class _Runner:
    """Asks, looks for an equal policy, measures, tells."""

    def __init__(
        self,
        study: SearchStudy,
        measure: Measure,
        arms: Sequence[Arm],
        *,
        n_trials: int,
        settings: TrialSettings,
        events: Events,
        timeout_seconds: float | None,
    ) -> None:
        self._arms = arms
        self._deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        self._study = study
        self._measure = measure
        self._n_trials = n_trials
        self._settings = settings
        self._events = events
        self._running: dict[str, _Asked] = {}
        self._num_asked = 0

    @property
    def is_over(self) -> bool:
        """Whether no new trial may begin."""
        return self._deadline is not None and time.monotonic() >= self._deadline

    @property
    def is_open(self) -> bool:
        """Whether there is something to run, or to wait for."""
        if self._study.is_exhausted or self.is_over:
            return False
        return self._study.num_finished < self._n_trials or bool(self._missing(baselines_only=True))

    @property
    def room(self) -> int:
        """How many trials may begin now: those that run count as finished, and so do baselines that must still run."""
        running = self._study.running_arms()
        to_run = [arm for arm in self._missing(baselines_only=True) if arm.name not in running]
        begun = self._study.num_finished + len(self._running) + len(self._study.elsewhere())
        return self._n_trials - begun - len(to_run)

    def arms(self) -> bool:
        """Run the baselines, and the warm starts that the number of trials has room for; FP32's failure stops all.

        Return whether any was run.
        """
        before = self._num_asked
        self._run(self._asked_arms())
        return self._num_asked > before

    def _missing(self, *, baselines_only: bool = False) -> list[Arm]:
        done = {record.arm for record in self._study.records}
        return [arm for arm in self._arms if arm.name not in done and (arm.is_baseline or not baselines_only)]

    def _asked_arms(self) -> Iterator[_Asked]:
        """Ask for each arm when it is its turn: another process may have taken it meanwhile."""
        for arm in self._missing():
            if not arm.is_baseline and (self.room <= 0 or self.is_over):
                continue
            with self._study.turn():
                self._reap_in_turn()
                elsewhere = self._study.elsewhere()
                taken = {*elsewhere.values(), *(record.arm for record in self._study.records)}
                is_run = arm.name in taken or self._study.parameters.key(arm.policy) in elsewhere  # or one equal to it
                asked = None if is_run else self._ask(None, arm)
            if asked is not None:
                yield asked

    def _has_reference(self) -> bool:
        """Wait where another process still runs FP32, beside which all else is told; False if nothing comes of it."""
        while self._study.fp32 is None and FP32 in self._study.elsewhere().values():
            if self.is_over:
                return False
            time.sleep(POLL_SECONDS)
            self._reap()
        return self._study.fp32 is not None

    def interrupted(self) -> bool:
        """Run again the sampled trials that did not finish, and those asked for with them. Return whether any was."""
        self._reap()
        values, is_untold = self._study.interrupted_values()
        room = max(0, self.room)
        wanted: list[Mapping[str, ParameterValue] | None] = [*values]
        if values and is_untold:
            wanted += [None] * (num_parallel(self._measure) - len(values))
        if wanted[:room] and not self.is_over:
            self.sample(wanted[:room])
            return True
        return False

    def _reap(self) -> None:
        with self._study.turn():
            self._reap_in_turn()

    def _reap_in_turn(self) -> None:
        num_lost = self._study.reap()
        if num_lost:
            self._events.note(f"{num_lost} trial(s) of a process that is gone are marked as failed and run again")

    def sample(self, wanted: Sequence[Mapping[str, ParameterValue] | None]) -> tuple[int, int]:
        """Run a trial for each of the given values; None asks the sampler.

        Return how many were asked for, fewer where other processes took their place, and how many policies were new.
        """
        before = self._study.num_finished
        asked: list[_Asked] = []
        try:
            for values in wanted:
                with self._study.turn():
                    each = self._ask_new(values) if self.room > len(asked) else None
                if each is not None:
                    asked.append(each)
        except BaseException:
            self._fail(asked)
            raise
        self._run(asked)
        return len(asked), self._study.num_finished - before

    def _ask_new(self, values: Mapping[str, ParameterValue] | None) -> _Asked | None:
        """Ask for a policy that no other process runs; None where that needs no run. Call it in turn."""
        elsewhere = self._study.elsewhere()
        if values is not None and self._study.parameters.key(self._study.parameters.policy(values)) in elsewhere:
            return None
        asked = self._ask(values)
        if asked is None or asked.key not in elsewhere:
            return asked
        self._study.fail(asked.trial)
        others = _unseen_values(self._study, seed=self._settings.seed)
        return None if others is None else self._ask(others)

    def _ask(self, values: Mapping[str, ParameterValue] | None, arm: Arm | None = None) -> _Asked | None:
        """Ask for a trial; None where its policy has ended so many workers that it is told as their end."""
        trial = self._study.ask(values, arm=arm)
        self._num_asked += 1
        policy = self._study.parameters.policy(trial.params) if arm is None else arm.policy
        key = self._study.parameters.key(policy)
        if self._study.num_lost(key) >= MAX_LOST and self._study.equal_to(key) is None:
            outcome = Outcome(kind="crashed", message=f"{MAX_LOST} workers ended without a word while they ran it")
            if arm is not None and arm.name == FP32:
                self._study.fail(trial)
                require_reference(outcome)
            self._study.tell(trial, policy, outcome)
            return None
        return _Asked(trial, policy, key, "sampled" if arm is None else arm.name)

    def _run(self, asked: Iterable[_Asked]) -> None:
        """Run what was asked for; of equal policies the first."""
        repeated: list[_Asked] = []
        source = iter(asked)

        def jobs() -> Iterator[tuple[_Asked, Policy, TrialSettings]]:
            for each in source:
                if each.key in self._running or self._study.equal_to(each.key) is not None:
                    repeated.append(each)
                    continue
                self._running[each.key] = each
                self._events.trial_started(each.trial.number, each.label, each.policy)
                yield each, each.policy, self._settings_for(each)

        try:
            with closing(measure_ahead(self._measure, jobs())) as results:
                for each, outcome in results:
                    if each.label == FP32:
                        require_reference(outcome)
                    elif not self._has_reference():
                        self._fail([self._running.pop(each.key)])
                        continue
                    record = self._study.tell(each.trial, each.policy, outcome)
                    del self._running[each.key]
                    if record is None:
                        self._events.note(f"trial {each.trial.number}: taken for lost meanwhile; its result is dropped")
                        continue
                    num_finished = self._study.num_finished
                    self._events.trial_finished(record, num_finished=num_finished, n_trials=self._n_trials)
            while repeated:
                each = repeated.pop(0)
                self._study.settle(each.trial, each.policy)
        except BaseException:
            self._fail(self._running.values())
            self._running.clear()
            for each in (*repeated, *(source if isinstance(asked, list) else ())):
                self._study.settle(each.trial, each.policy)
            raise

    def _settings_for(self, asked: _Asked) -> TrialSettings:
        """Let all but the baselines end when they can no longer be feasible."""
        reference = self._study.fp32
        if is_stock(asked.label) or reference is None:
            return self._settings
        return self._settings.model_copy(update={"abort": self._study.limits.abort_rules(reference.outcome)})

    def _fail(self, asked: Iterable[_Asked]) -> None:
        for each in asked:
            self._study.fail(each.trial)


def _unseen_values(study: SearchStudy, *, seed: int) -> dict[str, ParameterValue] | None:
    """Draw values whose policy was not run yet; None where many draws find none."""
    known = {*(record.key for record in study.records), *study.elsewhere()}
    parameters = study.parameters
    rng = np.random.default_rng([seed, len(study.records)])
    for _ in range(MAX_DRAWS):
        values = parameters.random_values(rng, {**parameters.fixed, **study.pinned})
        if parameters.key(parameters.policy(values)) not in known:
            return values
    return None


def require_reference(outcome: Outcome) -> None:
    """Stop where FP32 gives nothing to compare with.

    Raises:
        TaskError: the task itself raises; carries its traceback.
        StudyError: FP32 diverges, does not fit, or gives no number.
    """
    if outcome.kind == "user_error":
        raise TaskError(f"the task fails in FP32: {outcome.message}\n{outcome.traceback}".rstrip())
    if outcome.kind == "out_of_memory":
        raise StudyError(
            f"FP32 does not fit in memory ({outcome.message}); give a smaller --batch-size or --target-batch-size"
        )
    if not outcome.is_ok:
        raise StudyError(f"FP32 does not train ({outcome.kind}: {outcome.message}); nothing can be compared with it")
    if outcome.accuracy is None or outcome.eval_loss is None:
        raise StudyError(f"the metric or the loss is undefined on the held-out data in FP32 ({outcome.message})")
