"""The path of a search: study, arms, sampler, proof, recommendation, files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optuna.storages import RDBStorage

from autoprec.errors import UsageError
from autoprec.estimates.gpus import gpu_by_name
from autoprec.policy import Policy, load_policy, write_atomically
from autoprec.search.arms import FP32
from autoprec.search.events import Events
from autoprec.search.export import exported_policy, front_document, to_json
from autoprec.search.lookahead import Measure
from autoprec.search.measuring import open_measure
from autoprec.search.plan import MAX_FINALISTS, SearchPlan, SearchSettings, prepare_search, resolve_device
from autoprec.search.recommendation import Candidate, Choice, choose, gain, rank
from autoprec.search.runner import run_trials
from autoprec.search.samplers import build_sampler, quiet_optuna
from autoprec.search.storage import alone, open_storage, sqlite_url
from autoprec.search.study import SearchStudy, TrialRecord, open_study
from autoprec.search.verification import Contender, RunStore, Verification, verify
from autoprec.tasks.batches import count_samples, open_batches
from autoprec.tasks.protocol import Task
from autoprec.trials.outcome import TrialSettings

__all__ = ["SearchResult", "run_search", "search_policy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """What a search found. `candidates` are the arms of the table; `policy` is what policy.json holds."""

    plan: SearchPlan
    choice: Choice
    policy: Policy
    candidates: Sequence[Candidate]
    verification: Verification
    records: Sequence[TrialRecord]
    folder: Path

    @property
    def is_conclusive(self) -> bool:
        return self.choice.kind != "inconclusive"


def search_policy(
    task: Task,
    *,
    device: str | None = None,
    gpu: str = "a100-80",
    seed: int = 0,
    trial_timeout: float | None = 900.0,
    events: Events | None = None,
    **settings: Any,
) -> SearchResult:
    """Search the precision policy of a task: `search_policy(task, n_trials=12, output=Path("runs/mine"))`.

    Args:
        task: what is trained; with a `source` its trials run in a process of their own.
        device: where trials train; None takes CUDA where there is one.
        gpu: the target of computed and predicted numbers where the device is a CPU.
        seed: start weights, batch order and samples.
        trial_timeout: seconds after which a trial is ended, where it runs in a process of its own.
        events: hears the progress.
        settings: fields of `SearchSettings`.

    Raises:
        UsageError, StudyError, TaskError: as `prepare_search` and `run_search`.
    """
    trial = TrialSettings(seed=seed, device=resolve_device(device), gpu=gpu_by_name(gpu).name)
    plan = prepare_search(task, trial=trial, settings=SearchSettings(**settings))
    with open_measure(task, timeout_seconds=trial_timeout, num_workers=plan.num_workers) as measure:
        return run_search(plan, measure, events=events)


def run_search(plan: SearchPlan, measure: Measure, *, events: Events | None = None) -> SearchResult:
    """Run what is missing of a search and write its files; a search that is complete only writes them again.

    Raises:
        UsageError, StudyError, TaskError: nothing usable came out.
        KeyboardInterrupt: passed on after the best so far has been written.
    """
    events = events or Events()
    quiet_optuna()
    plan.folder.mkdir(parents=True, exist_ok=True)
    with alone(plan.folder):
        _check_folder(plan)
        storage = open_storage(plan.settings.storage or sqlite_url(plan.folder / "study.db"))
        study = _open(plan, storage)
        num_stale = study.fail_stale()
        if num_stale:
            events.note(f"{num_stale} trial(s) of a search that was stopped are marked as failed")
        events.resumed(study.records)
        verification = Verification(plan.settings.proof)
        try:
            run_trials(
                study,
                measure,
                arms=plan.arms,
                n_trials=plan.settings.n_trials,
                settings=plan.trial,
                events=events,
            )
            verification = _prove(plan, study, measure, events)
        except KeyboardInterrupt:
            if study.fp32 is not None:
                _finish(plan, study, verification)
            raise
        return _finish(plan, study, verification)


def _open(plan: SearchPlan, storage: RDBStorage) -> SearchStudy:
    sampler = build_sampler(plan.settings.sampler, seed=plan.trial.seed, fixed=plan.parameters.fixed)
    return open_study(
        storage,
        name=plan.study_name,
        identity=plan.identity,
        sampler=sampler,
        parameters=plan.parameters,
        limits=plan.settings.limits,
    )


def _check_folder(plan: SearchPlan) -> None:
    """Refuse a folder whose policy belongs to another study, so that nothing is overwritten."""
    path = plan.folder / "policy.json"
    if not path.exists():
        return
    found = load_policy(path).provenance
    if found is None or found.study_name != plan.study_name:
        other = found.study_name if found and found.study_name else "another tool or person"
        raise UsageError(f"the output folder holds the policy of {other}; give another -o")


def candidates_of(study: SearchStudy, plan: SearchPlan) -> list[Candidate]:
    """Return the baselines, then the found policies that are better than each of them by their own numbers.

    Of found policies with the same precisions only the first stands.
    """
    records = [record for record in study.records if not record.is_cached]
    baselines = [_candidate(r) for r in records if r.arm in {arm.name for arm in plan.arms if arm.is_baseline}]
    reference = next(c for c in baselines if c.name == FP32)
    usable = [c for c in baselines if c.outcome.is_ok]
    found = [_candidate(r) for r in records if r.is_feasible and _candidate(r).is_found]
    ranked = rank([*usable, *found], reference, plan.settings.prefer)
    better = ranked[: next(i for i, c in enumerate(ranked) if not c.is_found)]
    finalists = {(c.policy.default, tuple(c.policy.modules.items())): c for c in reversed(better)}
    return [*baselines, *[c for c in better if c in finalists.values()][:MAX_FINALISTS]]


def _candidate(record: TrialRecord) -> Candidate:
    return Candidate(record.label, record.policy, record.key, record.outcome)


def _prove(plan: SearchPlan, study: SearchStudy, measure: Measure, events: Events) -> Verification:
    candidates = candidates_of(study, plan)
    reference = next(c for c in candidates if c.name == FP32)
    return verify(
        [Contender(c.name, c.policy, c.key) for c in candidates if c.outcome.is_ok],
        measure,
        proof=plan.settings.proof,
        trial_settings=plan.trial,
        store=RunStore(study.study),
        gains={c.name: gain(c, reference, plan.settings.prefer) for c in candidates if c.outcome.is_ok},
        resolution=_resolution(plan),
        events=events,
    )


def _resolution(plan: SearchPlan) -> float:
    """Return the smallest step of an accuracy: one sample of the held-out data; 0 for another metric."""
    if plan.task.metric is None or plan.task.metric_name != "accuracy":
        return 0.0
    count = plan.task.num_samples or count_samples
    return 1.0 / max(1, sum(count(batch) for batch in open_batches(plan.task.eval_batches, name="held-out")))


def _finish(plan: SearchPlan, study: SearchStudy, verification: Verification) -> SearchResult:
    candidates = candidates_of(study, plan)
    choice = choose(
        candidates,
        verification,
        prefer=plan.settings.prefer,
        target=plan.target,
        target_is_here=plan.target_is_here,
    )
    policy = exported_policy(plan, choice, candidates, verification)
    records = study.records
    policy.save(plan.folder / "policy.json")
    write_atomically(plan.folder / "front.json", to_json(front_document(plan, study.front(), records, choice)))
    return SearchResult(
        plan=plan,
        choice=choice,
        policy=policy,
        candidates=candidates,
        verification=verification,
        records=records,
        folder=plan.folder,
    )
