"""The path of a search: study, arms, sampler, proof, recommendation, files."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from optuna.storages import BaseStorage, RDBStorage
from optuna.study import Study

from autoprec.errors import PrecisionWarning, UsageError
from autoprec.estimates.gpus import gpu_by_name
from autoprec.policy import Number, Policy, Recommendation, load_policy, remove_unfinished, write_atomically
from autoprec.search.anchors import drifted_workers
from autoprec.search.arms import FP32, is_scaled, scaled_autocast, scaled_name
from autoprec.search.budget import largest_batches
from autoprec.search.events import Events
from autoprec.search.export import end_window, exported_policy, proof_means
from autoprec.search.front import build_front
from autoprec.search.judging import Contender
from autoprec.search.locks import in_turn
from autoprec.search.lookahead import Measure
from autoprec.search.loss_test import lowers_loss
from autoprec.search.measuring import open_measure
from autoprec.search.metric import metric_of
from autoprec.search.parameters import AMSGRAD, AUTOCAST_DTYPE, EPS
from autoprec.search.plan import MAX_FINALISTS, SearchPlan, SearchSettings, prepare_search, resolve_device
from autoprec.search.presence import Presence, Role
from autoprec.search.profiling import Lessons, learn
from autoprec.search.proof import build_proof
from autoprec.search.ratios import outcome_ratios
from autoprec.search.recommendation import Choice, choose, order_of
from autoprec.search.revert import give_back, savings
from autoprec.search.runner import run_trials
from autoprec.search.samplers import build_sampler, quiet_optuna
from autoprec.search.scoring import OBJECTIVES
from autoprec.search.shares import Shares
from autoprec.search.sharing import require_one_machine, set_total
from autoprec.search.simplest import described, explicit, with_globs, without_idle_rules
from autoprec.search.storage import opened_alone, sqlite_url
from autoprec.search.study import SearchStudy, TrialRecord, load_or_create, open_study
from autoprec.search.verification import RunStore, Verification, verify
from autoprec.search.worth import PREFERENCES, Candidate, Prefer, Worth, in_order
from autoprec.tasks.protocol import Task
from autoprec.tasks.source import resolve_task
from autoprec.trials.checking import RAISES_IN_AUTOCAST
from autoprec.trials.isolation import isolated
from autoprec.trials.outcome import TrialSettings
from autoprec.trials.target import TargetFigures, estimate_figures

__all__ = ["SearchResult", "open_search", "run_search", "search_policy", "with_lessons", "with_ratios"]

SAVINGS_PREFIX = "autoprec:savings:"
FIGURES_PREFIX = "autoprec:figures:"
MAX_LOST = 5e-3
"""Share of memory or time that the shortest form of a policy may cost."""
MAX_ROUNDS = 3
"""Sets of finalists that are proved, one after the other, while all of a set, or what they had to beat, are refuted."""

PREFERENCE_WEIGHTS: Mapping[str, tuple[float, float, float]] = {
    "balanced": (1.0, 1.0, 0.0),
    "fastest": (0.1, 1.0, 0.0),
    "smallest": (1.0, 0.1, 0.0),
}
"""Weights of memory, time and accuracy in what the policy sampler looks for; accuracy is its constraint. Where time is
only predicted, the sampler goes by memory, which is exact; the recommendation weighs both."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """What a search found.

    Attributes:
        plan: what was fixed before the first trial.
        choice: what is recommended; `recommendation` is the same as the policy carries it.
        policy: what policy.json holds; it can always be applied.
        candidates: the arms of the table.
        verification: the proof.
        records: all finished trials.
        front: the feasible trials that no other feasible trial beats on all three objectives.
        study: the Optuna study.
        folder: where the files are.
    """

    plan: SearchPlan
    choice: Choice
    policy: Policy
    candidates: Sequence[Candidate]
    verification: Verification
    records: Sequence[TrialRecord]
    front: Sequence[TrialRecord]
    study: Study
    folder: Path

    @property
    def recommendation(self) -> Recommendation:
        assert self.policy.recommendation is not None
        return self.policy.recommendation

    @property
    def is_conclusive(self) -> bool:
        return self.choice.kind not in ("inconclusive", "unproved")


def search_policy(
    task: Task | str | Callable[[], Task],
    *,
    device: str | None = None,
    gpu: str = "a100-80",
    seed: int = 0,
    margin: float | None = None,
    max_seeds: int | None = None,
    proof_steps: int | None = None,
    proof_time: float | None = None,
    gpus_per_trial: int = 1,
    steps: int | None = None,
    trial_timeout: float | None = 900.0,
    events: Events | None = None,
    **settings: Any,
) -> SearchResult:
    """Search the precision policy of a task: `search_policy("mine.py:task", n_trials=12).policy`.

    Does what `autoprec search` does, and writes the same files. Works from a script, with or without a
    `if __name__ == "__main__":`, and from a notebook. Trials run in processes of their own where those can build the
    task: by name, or by a function of a module or file that can be imported. Any other task runs in this process,
    without a time limit and without protection from a crash, and a `PrecisionWarning` says so.

    Args:
        task: what is trained: the function that makes it, its name (`path/to/file.py:function` or
            `package.module:function`), or a `Task`.
        device: where trials train; None takes CUDA where there is one.
        gpu: the target of computed and predicted numbers where the device is a CPU.
        seed: start weights, batch order and samples.
        margin: how much worse than FP32 the metric may be, in its own units; None: a tenth of what FP32 gains.
        max_seeds: seeds that the proof may use; None takes the default.
        proof_steps: steps of the longest runs of the proof: they are doubled where FP32 learns too little; None takes
            the default.
        proof_time: seconds within which runs are made longer; None takes the default.
        gpus_per_trial: processes that train one model together, a GPU each.
        steps: optimizer steps of a trial, its warm-up included; None takes the default of `TrialSettings`.
        trial_timeout: seconds after which a trial is ended, where it runs in a process of its own.
        events: hears the progress and the notes; None turns the notes into warnings.
        settings: fields of `SearchSettings`, such as `n_trials`, `dtype`, `prefer`, `space` and `output`. A `proof`
            given here wins over `margin` and `max_seeds`.

    Raises:
        UsageError, StudyError, TaskError: as `prepare_search` and `run_search`.
    """
    trial = TrialSettings(
        seed=seed, device=resolve_device(device), gpu=gpu_by_name(gpu).name, num_processes=gpus_per_trial
    ).with_steps(steps)
    num_steps = trial.warmup_steps + trial.measured_steps
    proof = build_proof(margin, max_seeds, max_steps=proof_steps, max_seconds=proof_time, trial_steps=num_steps)
    wanted = {"proof": proof, **settings}
    plan = prepare_search(resolve_task(task), trial=trial, settings=SearchSettings(**wanted))
    for note in plan.notes:
        if events is None:
            warnings.warn(note, PrecisionWarning, stacklevel=2)
        else:
            events.note(note)
    with open_measure(
        plan.task, timeout_seconds=trial_timeout, num_workers=plan.num_workers, devices=plan.devices
    ) as measure:
        return run_search(plan, measure, events=events)


def run_search(plan: SearchPlan, measure: Measure, *, events: Events | None = None) -> SearchResult:
    """Run what is missing of a search and write its files; a search that is complete only writes them again.

    Raises:
        UsageError, StudyError, TaskError: nothing usable came out.
        KeyboardInterrupt: passed on after the best so far has been written.
    """
    events = events or Events()
    quiet_optuna()
    seconds = plan.settings.timeout_seconds
    deadline = None if seconds is None else time.monotonic() + seconds
    plan.folder.mkdir(parents=True, exist_ok=True)
    url = plan.settings.storage or sqlite_url(plan.folder / "study.db")
    with (
        opened_alone(url, plan.folder, plan.study_name) as storage,
        present(plan, storage, "search", events) as presence,
    ):
        _check_folder(plan)
        remove_unfinished(plan.folder)
        set_total(presence.study, plan.settings.n_trials)
        lessons = learn(plan, measure, events, presence)
        plan = with_lessons(plan, lessons)
        study = open_search(plan, storage, lessons, presence)
        with study.turn():
            num_failed = study.reap()
        if num_failed:
            events.note(f"{num_failed} trial(s) of a search that was stopped are marked as failed")
        events.resumed(study.records)
        verification = Verification(plan.settings.proof, metric=metric_of(plan.task))
        try:
            run_trials(
                study,
                measure,
                arms=plan.arms,
                n_trials=plan.settings.n_trials,
                settings=plan.trial,
                events=events,
                timeout_seconds=None if deadline is None else _trials_end(plan, deadline - time.monotonic()),
            )
            for told in drifted_workers(study.records):
                events.note(told)
            candidates = candidates_of(study, plan, lessons)
            if not plan.settings.is_quick:
                candidates, verification = _prove(plan, study, lessons, measure, events, deadline)
        except KeyboardInterrupt:
            if study.fp32 is not None:
                _finish(plan, study, candidates_of(study, plan, lessons), verification, lessons)
                events.note(f"the best so far is written: {plan.folder / 'policy.json'}")
            raise
        return _finish(plan, study, candidates, verification, lessons)


@contextlib.contextmanager
def present(plan: SearchPlan, storage: RDBStorage, role: Role, events: Events) -> Iterator[Presence]:
    """Open the study of a plan, where there is none make it, and be on it.

    Raises:
        UsageError, StudyError: as `load_or_create`; an SQLite file that another machine uses.
    """
    with in_turn(storage, plan.study_name):
        study = load_or_create(storage, name=plan.study_name, identity=plan.identity)
        presence = Presence(study, storage, role=role, heartbeat_seconds=plan.settings.heartbeat_seconds)
    with presence:
        require_one_machine(presence, storage.url, events)
        yield presence


def open_search(
    plan: SearchPlan, storage: BaseStorage, lessons: Lessons, presence: Presence | None = None
) -> SearchStudy:
    """Open the study of a search, with the sampler that its settings and its profile ask for."""
    fixed = {**plan.parameters.defaults, **plan.parameters.fixed, **lessons.fixed}
    sampler = build_sampler(
        plan.settings.sampler,
        seed=plan.trial.seed,
        fixed=fixed,
        prior=lessons.prior,
        preference=PREFERENCE_WEIGHTS[plan.settings.prefer if plan.target_is_here else "smallest"],
        reciprocal=[list(OBJECTIVES).index("throughput_samples_per_second")],
        same=[AUTOCAST_DTYPE],
        scaler=[name for name in fixed if name.startswith("grad_scaler/")],
        late=[EPS, AMSGRAD],
        families={AUTOCAST_DTYPE: lessons.families} if plan.parameters.dtype == "both" else None,
    )
    return open_study(
        storage,
        name=plan.study_name,
        identity=plan.identity,
        sampler=sampler,
        parameters=plan.parameters,
        limits=plan.settings.limits,
        pinned=lessons.prior.pinned,
        presence=presence,
    )


def with_lessons(plan: SearchPlan, lessons: Lessons) -> SearchPlan:
    """Return the plan with the arm that the profile calls for: stock autocast FP16 under the scaler that it chose."""
    scaled = scaled_autocast(plan.parameters, {n: v for n, v in lessons.fixed.items() if n.startswith("grad_scaler/")})
    num_stock = sum(arm.is_baseline for arm in plan.arms)
    return replace(plan, arms=(*plan.arms[:num_stock], *scaled, *plan.arms[num_stock:]))


def _trials_end(plan: SearchPlan, seconds: float) -> float:
    """Return how much of the time given the trials may use: the proof needs its first look, if that is forecast."""
    first_look = 0.0 if plan.settings.is_quick else plan.proof_seconds(plan.trial_seconds)[0] / plan.num_workers
    return max(seconds - first_look, seconds / 3)


def _check_folder(plan: SearchPlan) -> None:
    """Refuse a folder whose policy belongs to another study, so that nothing is overwritten."""
    path = plan.folder / "policy.json"
    if not path.exists():
        return
    found = load_policy(path).provenance
    if found is None or found.study_name != plan.study_name:
        other = found.study_name if found and found.study_name else "another tool or person"
        raise UsageError(f"the output folder holds the policy of {other}; give another -o")


def candidates_of(
    study: SearchStudy, plan: SearchPlan, lessons: Lessons, refuted: Sequence[Candidate] = ()
) -> list[Candidate]:
    """Return the baselines, then the found policies, in their shortest form, that are better than each of them.

    At most `MAX_FINALISTS` for the preference that was asked for and the best for each other one, so that a choice can
    be made again; where both dtypes are searched, the best of each. Found policies that a proof has `refuted` stand
    beside them, and baselines that it has refuted are no more to be better than. Of found policies with the same
    precisions only the one with the default optimizer settings stands; one with other settings where they lower the
    loss beside it.
    """
    settings = plan.settings
    records = [record for record in study.records if not record.is_cached]
    baselines = [_candidate(r) for r in records if r.arm in {arm.name for arm in plan.arms if arm.is_baseline}]
    found = [_candidate(r) for r in records if r.is_feasible and _candidate(r).is_found]
    known = {c.key for c in refuted}
    found = [c for c in found if c.fits(settings.memory_budget_bytes) and c.key not in known]
    standing = [c for c in baselines if c.key not in known]
    finalists = _finalists(standing, found, settings.prefer, plan.worth)[:MAX_FINALISTS]
    for dtype in plan.parameters.families if plan.parameters.dtype == "both" else ():
        own = [c for c in found if dtype in c.policy.low_precisions]
        finalists += [c for c in _finalists(standing, own, settings.prefer, plan.worth)[:1] if c not in finalists]
    for other in PREFERENCES:
        finalists += [c for c in _finalists(standing, found, other, plan.worth)[:1] if c not in finalists]
    taken = {c.key for c in (*baselines, *refuted)}
    short = [_shortest(c, plan, study, lessons, taken) for c in finalists]
    unique = {c.key: c for c in reversed(short) if c.key not in taken}
    return [*baselines, *(c for c in refuted if c.is_found), *reversed(unique.values())]


def _shortest(
    candidate: Candidate, plan: SearchPlan, study: SearchStudy, lessons: Lessons, taken: Collection[str]
) -> Candidate:
    """Bring a found policy to its shortest form, under the name of what it does, with that form's own figures.

    Where that form was refuted, or needs more memory or time than the trial, only its rules are written shorter.
    """
    parameters, names = plan.parameters, plan.model.modules
    plain = explicit(candidate.policy, parameters, names)
    short = without_idle_rules(plain, parameters, lessons.profile, lessons.reasons)
    key, outcome = parameters.key(short), candidate.outcome
    if key != candidate.key and not plan.target_is_here:
        outcome = candidate.outcome.model_copy(update=_figures(plan, study, short, key))
    ratios = outcome_ratios(outcome, candidate.outcome)
    more, slower = (1.0 if ratio is None else ratio.value for ratio in (ratios.memory, ratios.throughput))
    if key in taken or more > 1 + MAX_LOST or slower < 1 - MAX_LOST:
        short, key, outcome = plain, candidate.key, candidate.outcome
    written = with_globs(short, names)
    return Candidate(described(written), written, key, outcome, trial=candidate.name)


def _figures(plan: SearchPlan, study: SearchStudy, policy: Policy, key: str) -> dict[str, Number]:
    """Return computed memory and predicted throughput of a policy that no trial ran; kept in the study."""
    attribute = f"{FIGURES_PREFIX}{key}"
    known = study.study.user_attrs.get(attribute)
    if known is None:
        with isolated():
            found = estimate_figures(plan.task, policy, plan.trial)
        numbers = {name: getattr(found, name) for name in OBJECTIVES if hasattr(found, name)}
        known = {name: number.model_dump(mode="json") for name, number in numbers.items()}
        study.study.set_user_attr(attribute, known)
    return {name: Number(**number) for name, number in known.items()}


def _finalists(
    baselines: Sequence[Candidate], found: Sequence[Candidate], prefer: Prefer, worth: Worth
) -> list[Candidate]:
    reference = next(c for c in baselines if c.name == FP32)
    ranked = in_order([*(c for c in baselines if c.outcome.is_ok), *found], reference, prefer, worth)
    better = ranked[: next(i for i, c in enumerate(ranked) if not c.is_found)]
    standing = {_precisions(c): c for c in reversed(better) if c.policy.optimizer is None}
    for candidate in (c for c in better if c.policy.optimizer is not None):
        known = standing.get(_precisions(candidate))
        if known is not None and lowers_loss(candidate.outcome, known.outcome):
            standing[_precisions(candidate)] = candidate
    return [c for c in better if c in standing.values()]


def _precisions(candidate: Candidate) -> tuple[Any, ...]:
    return candidate.policy.default, candidate.policy.dtype, tuple(candidate.policy.modules.items())


def _candidate(record: TrialRecord) -> Candidate:
    return Candidate(record.label, record.policy, record.key, record.outcome)


def _prove(
    plan: SearchPlan,
    study: SearchStudy,
    lessons: Lessons,
    measure: Measure,
    events: Events,
    deadline: float | None,
) -> tuple[list[Candidate], Verification]:
    """Return the arms of the proof, with what the revert pass added, and their verification."""
    prove = _Prover(plan, study, measure, events, deadline)
    scaler = _late_scaler(candidates_of(study, plan, lessons), prove, lessons, events)
    refuted: list[Candidate] = []
    for _ in range(MAX_ROUNDS):
        candidates = [_rescaled(c, scaler, study) for c in candidates_of(study, plan, lessons, refuted)]
        order = order_of(candidates, plan.settings.prefer, plan.worth, plan.settings.memory_budget_bytes)
        verification = prove([c for c in candidates if c.outcome.is_ok], order)
        num_before = len(refuted)
        refuted = [c for c in candidates if _is_refuted(c, verification)]
        if len(refuted) == num_before or any(c.is_found and c not in refuted for c in candidates):
            break
    candidates = with_ratios(candidates, verification)
    return _revert(plan, study, prove, candidates, verification)


def _late_scaler(candidates: Sequence[Candidate], prove: _Prover, lessons: Lessons, events: Events) -> float | None:
    """Train FP32 for the proof, and return the init_scale that its trained weights call for; None keeps the profile's.

    Not where time is measured: there FP32 has to run beside the arms.
    """
    scaled = next((c for c in candidates if is_scaled(c.name) and c.policy.grad_scaler is not None), None)
    if scaled is None or scaled.policy.grad_scaler is None or _is_timed(candidates):
        return None
    reference = next(c for c in candidates if c.name == FP32)
    window = end_window(prove([reference], [FP32]), lessons.profile)
    scale = scaled.policy.grad_scaler.init_scale
    if window is None or window.holds(scale):
        return None
    found = min(max(scale, window.low), window.high)
    events.note(
        f"init_scale {scale:g} lies outside the safe window of FP32's trained weights, {window.low:g} to "
        f"{window.high:g}: plain autocast FP16 is proved with {found:g}"
    )
    return found


def _rescaled(candidate: Candidate, scale: float | None, study: SearchStudy) -> Candidate:
    """Give stock autocast FP16 under the profile's grad scaler the scale that trained weights call for."""
    scaler = candidate.policy.grad_scaler
    if scale is None or not is_scaled(candidate.name) or scaler is None:
        return candidate
    policy = candidate.policy.replace(grad_scaler=scaler.model_copy(update={"init_scale": scale}))
    name = scaled_name(scale)
    return replace(candidate, name=name, policy=policy, key=study.parameters.key(policy), trial=candidate.name)


def _is_refuted(candidate: Candidate, verification: Verification) -> bool:
    verdict = verification.verdicts.get(candidate.name)
    return verdict is not None and verdict.kind == "refuted"


class _Prover:
    """Proves arms on the seeds of the study's proof."""

    def __init__(
        self, plan: SearchPlan, study: SearchStudy, measure: Measure, events: Events, deadline: float | None
    ) -> None:
        self._plan, self._measure, self._events, self._deadline = plan, measure, events, deadline
        self._store = RunStore(study.study)
        self._shares = Shares(plan.settings.proof, study.study)
        self._metric = metric_of(plan.task)

    def __call__(
        self, candidates: Sequence[Candidate], order: Sequence[str], *, may_lengthen: bool = True
    ) -> Verification:
        return verify(
            [Contender(c.name, c.policy, c.key) for c in candidates],
            self._measure,
            proof=self._plan.settings.proof,
            trial_settings=self._plan.trial,
            store=self._store,
            shares=self._shares,
            order=order,
            metric=self._metric,
            events=self._events,
            deadline=self._deadline,
            is_timed=_is_timed(candidates),
            may_lengthen=may_lengthen,
        )


def _is_timed(candidates: Sequence[Candidate]) -> bool:
    """Whether throughput is measured, so that arms and FP32 have to run side by side."""
    numbers = (c.outcome.throughput_samples_per_second for c in candidates)
    return any(number is not None and number.kind == "measured" for number in numbers)


def with_ratios(candidates: Sequence[Candidate], verification: Verification) -> list[Candidate]:
    """Give each candidate the ratios that were measured in the pairs of the proof."""
    return [replace(c, paired=verification.ratios(c.name)) for c in candidates]


def _revert(
    plan: SearchPlan,
    study: SearchStudy,
    prover: _Prover,
    candidates: list[Candidate],
    verification: Verification,
) -> tuple[list[Candidate], Verification]:
    """Give back what the winner keeps in FP32 for nothing; the arms that were tried join the others."""
    choice = _choose(plan, candidates, verification)
    if choice.kind != "policy":
        return candidates, verification
    by_name = {c.name: c for c in candidates}
    winner, reference = by_name[choice.name], by_name[FP32]
    names = plan.model.modules
    winner = replace(winner, policy=explicit(winner.policy, study.parameters, names))

    def prove(name: str, policy: Policy) -> tuple[Candidate, Verification]:
        arm = Candidate(name, policy, study.parameters.key(policy), reference.outcome)
        found = prover([reference, arm], [FP32, name], may_lengthen=False)  # behind FP32: the first look alone
        outcome = next(iter(found.outcomes[name].values()), reference.outcome)
        return replace(arm, outcome=outcome, paired=found.ratios(name)), found

    reverted = give_back(
        winner,
        reference,
        saved=_savings(plan, study, winner),
        parameters=study.parameters,
        prefer=plan.settings.prefer,
        prove=prove,
    )
    for tried, found in reverted.tried:
        arm = replace(tried, policy=with_globs(tried.policy, names))
        candidates = [*candidates, arm]
        verification = replace(
            verification,
            verdicts={**verification.verdicts, arm.name: found.verdicts[arm.name]},
            outcomes={**verification.outcomes, arm.name: found.outcomes[arm.name]},
        )
    return with_ratios(candidates, verification), verification  # intervals that hold for all arms, these among them


def _savings(plan: SearchPlan, study: SearchStudy, winner: Candidate) -> dict[str, float]:
    """Return what giving back each group would save; kept in the study, so that it is computed once."""
    attribute = f"{SAVINGS_PREFIX}{winner.key}"
    known = study.study.user_attrs.get(attribute)
    if known is None:

        def estimate(policy: Policy) -> TargetFigures:
            with isolated():
                return estimate_figures(plan.task, policy, plan.trial)

        known = savings(winner.policy, study.parameters, estimate, with_time=plan.target_is_here)
        study.study.set_user_attr(attribute, known)
    return dict(known)


def _choose(plan: SearchPlan, candidates: Sequence[Candidate], verification: Verification) -> Choice:
    choice = choose(
        candidates,
        verification,
        prefer=plan.settings.prefer,
        target=plan.target,
        target_is_here=plan.target_is_here,
        worth=plan.worth,
        memory_budget_bytes=plan.settings.memory_budget_bytes,
        is_quick=plan.settings.is_quick,
    )
    raising = next((note for note in plan.notes if note.startswith(RAISES_IN_AUTOCAST)), None)
    if choice.kind != "autocast" or raising is None:
        return choice
    told = f"{choice.sentence.removesuffix('.')}; but {raising}: apply the policy.json that was written instead."
    return replace(choice, sentence=told)


def _finish(
    plan: SearchPlan,
    study: SearchStudy,
    candidates: Sequence[Candidate],
    verification: Verification,
    lessons: Lessons,
) -> SearchResult:
    choice = _choose(plan, candidates, verification)
    policy = exported_policy(plan, choice, candidates, verification, lessons)
    records = study.records
    front = study.front()
    shown = {c.trial or c.name for c in candidates}
    members = [*candidates, *(_candidate(record) for record in front if record.label not in shown)]
    budget = plan.settings.memory_budget_bytes
    document = build_front(
        members,
        verification,
        choice,
        study_name=plan.study_name,
        task=plan.task.name,
        target=plan.target,
        target_is_here=plan.target_is_here,
        trials={record.label: record.number for record in records if not record.is_cached},
        on_front=frozenset(record.label for record in front),
        means={name: proof_means(runs, verification.metric) for name, runs in verification.outcomes.items()},
        worth=plan.worth,
        is_quick=plan.settings.is_quick,
        memory_budget_bytes=budget,
        largest=None
        if budget is None
        else largest_batches(study.study, plan.task, plan.trial, members, budget_bytes=budget),
    )
    policy.save(plan.folder / "policy.json")
    write_atomically(plan.folder / "front.json", document.to_json())
    return SearchResult(
        plan=plan,
        choice=choice,
        policy=policy,
        candidates=candidates,
        verification=verification,
        records=records,
        front=front,
        study=study.study,
        folder=plan.folder,
    )
