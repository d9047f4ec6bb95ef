"""The proof of any policy, found or written by hand: FP32, the policy and plain autocast on unused seeds, here."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from autoprec.apply import apply_policy, describe_model, read_structure, remove_policy
from autoprec.errors import PrecisionWarning
from autoprec.estimates.gpus import gpu_by_name
from autoprec.policy import ArmEvidence, Evidence, ModelInfo, Policy, Recommendation, content_hash
from autoprec.search.arms import AUTOCAST_BF16, AUTOCAST_FP16, BASELINES, FP32
from autoprec.search.events import Events
from autoprec.search.export import arm_evidence, build_provenance, verification_evidence
from autoprec.search.fingerprint import Identity, identity_hash, study_identity, versions
from autoprec.search.gate import Gate, compare_with_promise
from autoprec.search.judging import Contender, Verdict
from autoprec.search.lookahead import Measure
from autoprec.search.measuring import open_measure
from autoprec.search.metric import metric_of
from autoprec.search.parameters import policy_key
from autoprec.search.pipeline import with_ratios
from autoprec.search.plan import file_name, resolve_device, target_of, task_identity, trial_identity
from autoprec.search.proof import Proof, build_proof
from autoprec.search.recommendation import Telling
from autoprec.search.runner import require_reference
from autoprec.search.samplers import quiet_optuna
from autoprec.search.shares import Shares
from autoprec.search.storage import opened_alone, sqlite_url
from autoprec.search.study import load_or_create
from autoprec.search.verification import RunStore, Verification, verify
from autoprec.search.worth import Candidate
from autoprec.tasks.protocol import Task
from autoprec.tasks.source import resolve_task
from autoprec.trials.building import build_model
from autoprec.trials.checking import check_task
from autoprec.trials.isolation import isolated, seed_everything
from autoprec.trials.outcome import Outcome, TrialSettings
from autoprec.trials.pool import default_num_workers

__all__ = ["PolicyProof", "verify_policy"]

FIRST_SEED = 100_000
"""Distance to the first seed: neither a trial nor the proof of a search used these, so that the evidence is new."""
POLICY = "policy"
TOLERANCE = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyProof:
    """What the proof of one policy found.

    Attributes:
        policy: as it was given, or read from its file.
        name: the arm that it is.
        arms: FP32, the policy and plain autocast with their numbers.
        verification: verdicts and runs.
        gate: what the file promises beside what was found.
        target: the device that memory and throughput are for; `target_is_here` says whether they were measured on it.
        evidence, model: what `updated_policy` writes.
    """

    policy: Policy
    name: str
    arms: Mapping[str, ArmEvidence]
    verification: Verification
    gate: Gate
    target: str
    target_is_here: bool
    task_name: str
    identity: Identity
    trial: TrialSettings
    study_name: str
    folder: Path
    model: ModelInfo

    @property
    def verdict(self) -> Verdict:
        return self.verification.verdicts[self.name]

    @property
    def is_proved(self) -> bool:
        """Whether the policy is not worse than FP32 and nothing fell behind what its file promises."""
        return self.verdict.is_safe and self.gate.holds

    @property
    def is_worse(self) -> bool:
        """Whether the policy is worse than FP32 by more than the margin, or behind what its file promises."""
        return self.verdict.kind == "refuted" or not self.gate.holds

    @property
    def sentence(self) -> str:
        """The answer in one sentence."""
        verdict, found = self.verdict, self.verification
        told = Telling.of_proof(found)
        mean = "" if verdict.difference is None else f" ({told.difference(verdict.difference)})"
        margin = "the margin" if verdict.margin is None else f"{verdict.margin:.3g}"
        if verdict.kind == "insensitive":
            what = f"Insensitive: {told.insensitive([verdict])}"
        else:
            what = {
                "proved": f"Proved: {found.metric.name} not worse than FP32's by more than {margin}",
                "refuted": f"Worse: {verdict.reason}",
                "open": f"Open: {verdict.reason}; a margin of {margin} is not proved",
                "failed": f"Cannot run here: the policy {verdict.reason}",
            }[verdict.kind]
        needed = self.verification.num_seeds_needed
        more = f"; about {needed} seeds would do (--max-seeds)" if verdict.kind == "open" and needed else ""
        behind = [comparison.what for comparison in self.gate.comparisons if comparison.behind]
        promise = f"; behind what the file promises: {', '.join(behind)}" if behind else ""
        here = "" if self.target_is_here else f"; provisional: {self.target} was not there"
        seeds = "" if verdict.difference is None else f", {found.num_seeds} paired seeds of {found.num_steps} steps"
        return f"{what}{mean}{seeds}{more}{promise}{here}."

    def updated_policy(self) -> Policy:
        """Return the policy with this proof as its evidence; only a proved one keeps a recommendation."""
        before = self.policy.evidence or Evidence()
        recommendation = None
        if self.verdict.is_safe:
            known = self.policy.recommendation
            recommendation = Recommendation(
                choice="policy" if known is None or known.choice == "inconclusive" else known.choice,
                sentence=self.sentence,
                provisional=not self.target_is_here,
                prefer="balanced" if known is None else known.prefer,
            )
        return self.policy.replace(
            model=self.model,
            recommendation=recommendation,
            evidence=before.model_copy(
                update={
                    "arm": self.name,
                    "arms": dict(self.arms),
                    "verification": verification_evidence(self.verification),
                }
            ),
            provenance=build_provenance(
                self.trial,
                identity=self.identity,
                task=self.task_name,
                study_name=self.study_name,
                target=self.target,
                target_is_here=self.target_is_here,
            ),
        )


def verify_policy(
    policy: Policy,
    task: Task | str | Callable[[], Task],
    *,
    device: str | None = None,
    gpu: str = "a100-80",
    seed: int = 0,
    margin: float | None = None,
    max_seeds: int = 8,
    num_steps: int = 40,
    proof_steps: int | None = None,
    proof_time: float | None = None,
    with_autocast: bool = True,
    tolerance: float = TOLERANCE,
    trial_timeout: float | None = 900.0,
    storage: str | None = None,
    output: Path | None = None,
    events: Events | None = None,
    measure: Measure | None = None,
) -> PolicyProof:
    """Prove a policy on a task, here: `verify_policy(load_policy("policy.json"), task).is_proved`.

    FP32, the policy and plain autocast in the policy's dtype are trained on seeds that no search used, paired and in
    turns. The runs are kept in a study of their own (`runs/verify-<task>-<hash>`), which other policies of the same
    task share; what it holds is not run again.

    Args:
        policy: found or written by hand.
        task: what is trained: a function that makes a `Task`, its name, or the `Task`.
        device: where it trains; None takes CUDA where there is one.
        gpu: the target of computed and predicted numbers where the device is a CPU.
        seed: moves all seeds of the proof.
        margin: how much worse than FP32 the metric may be; None takes what the file records, else a tenth of what FP32
            gains over its start weights.
        max_seeds: looks are taken after 4 seeds, at each doubling and at this number.
        num_steps: steps of each run, the learning rate falling to zero; doubled where FP32 learns too little.
        proof_steps, proof_time: steps and seconds up to which they are doubled.
        with_autocast: whether plain autocast runs beside the policy.
        tolerance: how far memory and throughput may fall behind what the file promises, relative.
        trial_timeout: seconds after which a run is ended, where it has a process of its own.
        storage: an Optuna database URL; None takes `study.db` in the output folder.
        output: the folder of the runs.
        events: hears the progress.
        measure: runs one training; None takes a process of its own for a task that can travel.

    Raises:
        ApplyError: the policy does not fit the model.
        UsageError, StudyError, TaskError: as `search_policy`.
    """
    trial = TrialSettings(seed=seed, device=resolve_device(device), gpu=gpu_by_name(gpu).name)
    proof = build_proof(
        _margin(policy, margin),
        max_seeds,
        num_steps=num_steps,
        max_steps=proof_steps,
        max_seconds=proof_time,
        arm_share=1.0,
        first_seed=FIRST_SEED,
    )
    plan = _prepare(policy, resolve_task(task), trial, proof, with_autocast=with_autocast)
    folder = output or Path("runs") / plan.study_name
    with (
        _opened(plan, folder, storage) as store,
        _measuring(plan, measure, trial_timeout) as run,
    ):
        verification = _train(plan, run, store, events or Events())
    return _answer(plan, verification, folder=folder, tolerance=tolerance)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """Everything that is fixed before the first run. `contenders` are FP32, the policy, and what runs beside it."""

    policy: Policy
    task: Task
    trial: TrialSettings
    proof: Proof
    model: ModelInfo
    identity: Identity
    study_name: str
    contenders: Sequence[Contender]

    @property
    def name(self) -> str:
        return self.contenders[1].name


def _prepare(policy: Policy, task: Task, trial: TrialSettings, proof: Proof, *, with_autocast: bool) -> _Plan:
    """Check that the task trains and that the policy fits, and name the study of the runs.

    Raises:
        ApplyError, TaskError: one of the two does not hold.
    """
    check_task(task, trial, num_steps=proof.num_steps)
    model = _fitting_model(policy, task, trial)
    identity = study_identity(
        task=task_identity(task),
        trial=trial_identity(trial),
        model=content_hash(model.model_dump_json()),
        proof=proof.identity,
        versions=versions(),
    )
    return _Plan(
        policy=policy,
        task=task,
        trial=trial,
        proof=proof,
        model=model,
        identity=identity,
        study_name=f"verify-{file_name(task.name)}-{identity_hash(identity)}",
        contenders=_contenders(policy, with_autocast=with_autocast),
    )


def _train(plan: _Plan, measure: Measure, store: RunStore, events: Events) -> Verification:
    """Make the runs that the store lacks. The policy alone is claimed: it has the whole error."""
    return verify(
        plan.contenders,
        measure,
        proof=plan.proof,
        trial_settings=plan.trial,
        store=store,
        shares=Shares(plan.proof),
        order=[plan.name, FP32],
        metric=metric_of(plan.task),
        events=events,
        check_reference=require_reference,
        is_timed=torch.device(plan.trial.device).type != "cpu",
    )


def _answer(plan: _Plan, verification: Verification, *, folder: Path, tolerance: float) -> PolicyProof:
    """Put the numbers of the proof beside what the policy's file promises."""
    arms = arm_evidence(_candidates(plan.contenders, verification), verification)
    target, target_is_here = target_of(plan.trial)
    gate = compare_with_promise(
        plan.policy,
        arms[plan.name],
        identity=plan.identity,
        target=target,
        target_is_here=target_is_here,
        num_steps=verification.num_steps,
        tolerance=tolerance,
    )
    return PolicyProof(
        policy=plan.policy,
        name=plan.name,
        arms=arms,
        verification=verification,
        gate=gate,
        target=target,
        target_is_here=target_is_here,
        task_name=plan.task.name,
        identity=plan.identity,
        trial=plan.trial,
        study_name=plan.study_name,
        folder=folder,
        model=plan.model,
    )


def _margin(policy: Policy, margin: float | None) -> float | None:
    """Return the absolute margin that is given or that the file records; None for one relative to FP32's gain."""
    recorded = None if policy.evidence is None else policy.evidence.verification
    if margin is not None or recorded is None or recorded.max_lost_share is not None:
        return margin
    return recorded.margin


def _fitting_model(policy: Policy, task: Task, trial: TrialSettings) -> ModelInfo:
    """Return the structure of the task's model after a trial of fit, so that nothing runs for a policy that does not.

    Raises:
        ApplyError: it does not fit.
    """
    with isolated(), warnings.catch_warnings():
        warnings.simplefilter("ignore", PrecisionWarning)  # a run says the same, and emulates what is slow here
        seed_everything(trial.seed)
        model = build_model(task, torch.device("cpu"))
        apply_policy(model, policy)
        remove_policy(model)
        return describe_model(read_structure(model), task.name)


def _contenders(policy: Policy, *, with_autocast: bool) -> list[Contender]:
    """Return FP32, the policy under its own name, and plain autocast where the policy is not just that."""
    recorded = POLICY if policy.evidence is None else policy.evidence.arm
    name = POLICY if recorded in BASELINES or not recorded else recorded
    autocast = AUTOCAST_BF16 if policy.dtype == "bf16" else AUTOCAST_FP16
    found = [_contender(FP32, BASELINES[FP32]), _contender(name, policy)]
    beside = _contender(autocast, BASELINES[autocast])
    return [*found, beside] if with_autocast and beside.key not in [c.key for c in found] else found


def _contender(name: str, policy: Policy) -> Contender:
    return Contender(name, policy, policy_key(policy))


@contextlib.contextmanager
def _opened(plan: _Plan, folder: Path, storage: str | None) -> Iterator[RunStore]:
    quiet_optuna()
    folder.mkdir(parents=True, exist_ok=True)
    url = storage or sqlite_url(folder / "study.db")
    with opened_alone(url, folder, plan.study_name) as database:
        yield RunStore(load_or_create(database, name=plan.study_name, identity=plan.identity))


@contextlib.contextmanager
def _measuring(plan: _Plan, measure: Measure | None, trial_timeout: float | None) -> Iterator[Measure]:
    if measure is not None:
        yield measure
        return
    workers = default_num_workers(plan.task, plan.trial.device)
    with open_measure(plan.task, timeout_seconds=trial_timeout, num_workers=workers) as opened:
        yield opened


def _candidates(contenders: Sequence[Contender], verification: Verification) -> list[Candidate]:
    """Return the arms with the outcome of their first run, which gives memory and throughput."""
    first = {c.name: next(iter(verification.outcomes[c.name].values()), Outcome(kind="ok")) for c in contenders}
    return with_ratios([Candidate(c.name, c.policy, c.key, first[c.name]) for c in contenders], verification)
