"""The folder of a small search as `autoprec search` leaves it, written without training; its names mean harm."""

from __future__ import annotations

from pathlib import Path

import optuna

from autoprec.policy import Evidence, GradScalerSettings, Number, Policy, Recommendation, UnitEvidence, write_atomically
from autoprec.probes.ranges import ExponentHistogram
from autoprec.profiling.profile import HalfError, PrecisionCost, Profile, UnitProfile
from autoprec.search.arms import BASELINES
from autoprec.search.export import proof_means
from autoprec.search.front import build_front
from autoprec.search.judging import Contender, Verdict
from autoprec.search.metric import Metric
from autoprec.search.proof import Proof
from autoprec.search.recommendation import Choice
from autoprec.search.scoring import OBJECTIVES
from autoprec.search.statistics import Interval
from autoprec.search.storage import open_storage, sqlite_url
from autoprec.search.study import load_or_create
from autoprec.search.verification import RunStore, Verification
from autoprec.search.worth import Candidate, Worth
from autoprec.trials.outcome import EndKind, Outcome

STUDY = "tiny-0123456789"
SCRIPT = "<script>alert(1)</script>"
IMAGE = "<img src=x onerror=alert(2)>"
MARKUP = "[red]bold[/red]"
CLOSING = "</script><b>`evil` & co</b>"
UNITS = ("stem", f"blocks.{SCRIPT}", f"blocks.{IMAGE}", MARKUP)
FOUND = Policy(
    default="autocast",
    dtype="fp16",
    modules={UNITS[1]: "fp16", "stem": "fp32"},
    grad_scaler=GradScalerSettings(init_scale=1024.0),
)
GIB = 2**30
NUM_STEPS = 5


def outcome(policy: Policy, *, shift: float = 0.0, kind: EndKind = "ok", message: str = "") -> Outcome:
    """Return an outcome with curves; losses are 2 - 0.1 a step + shift."""
    if kind != "ok":
        return Outcome(kind=kind, message=message, step=2, num_steps_skipped=2, scale_history=[2.0, 0.0])
    low = policy.default != "fp32"
    return Outcome(
        kind="ok",
        peak_memory_bytes=Number(value=(2.0 if low else 4.0) * GIB, kind="computed"),
        memory_by_category={"parameters": 1.0 * GIB, "activations": (1.0 if low else 3.0) * GIB},
        throughput_samples_per_second=Number(value=200.0 if low else 100.0, kind="predicted"),
        accuracy=Number(value=0.9 - shift, kind="emulated" if low else "measured"),
        eval_loss=Number(value=1.0 + shift, kind="emulated" if low else "measured"),
        train_losses=[2.0 - 0.1 * step + shift for step in range(NUM_STEPS)],
        scale_history=[65536.0, 32768.0, 32768.0, 32768.0, 32768.0] if policy.dtype == "fp16" and low else [],
        grad_norms=[None if low else 1.0, 1.0, 1.0, 1.0, 1.0],
        num_steps_taken=NUM_STEPS - low,
        num_steps_skipped=int(low),
        wall_seconds=3.0,
    )


def store_study(folder: Path) -> None:
    """Write policy.json, front.json, profile.json and study.db to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    study = load_or_create(open_storage(sqlite_url(folder / "study.db")), name=STUDY, identity={})
    outcomes = {name: outcome(policy) for name, policy in BASELINES.items()}
    for name, policy in BASELINES.items():
        _tell(study, name, policy, outcomes[name])
    outcomes["trial 3"] = outcome(FOUND, shift=0.01)
    _tell(study, "", FOUND, outcomes["trial 3"])
    _tell(study, CLOSING, FOUND, outcome(FOUND, kind="non_finite_loss", message=f"first in {SCRIPT} {MARKUP}"))
    study.tell(study.ask(), state=optuna.trial.TrialState.FAIL)
    runs = {"fp32": _runs(BASELINES["fp32"], 0.0), "trial 3": _runs(FOUND, 0.01)}
    for name, policy in (("fp32", BASELINES["fp32"]), ("trial 3", FOUND)):
        for seed, run in runs[name].items():
            RunStore(study).add(Contender(name, policy, name), seed, NUM_STEPS, run)
    _write_files(folder, outcomes, runs)


def _tell(study: optuna.Study, arm: str, policy: Policy, result: Outcome) -> None:
    study.enqueue_trial({}, user_attrs={"arm": arm} if arm else {})
    trial = study.ask()
    for unit in UNITS:
        trial.suggest_categorical(f"precision/{unit}", ["fp32", "autocast", "fp16"])
    trial.set_user_attr("policy", policy.model_dump(mode="json", exclude_none=True))
    trial.set_user_attr("policy_key", arm)
    trial.set_user_attr("outcome", result.model_dump(mode="json"))
    trial.set_constraint("finite", -1.0 if result.is_ok else 1.0)
    numbers = [getattr(result, name) for name in OBJECTIVES]
    study.tell(trial, [0.0 if number is None else number.value for number in numbers])


def _runs(policy: Policy, shift: float) -> dict[int, Outcome]:
    return {seed: outcome(policy, shift=shift + 0.2 * seed) for seed in range(2)}


def _write_files(folder: Path, outcomes: dict[str, Outcome], runs: dict[str, dict[int, Outcome]]) -> None:
    verdicts = {
        "fp32": Verdict("reference", None, "the reference of the comparison"),
        "trial 3": Verdict("proved", Interval(2, -0.01, 0.02), f"as good in {SCRIPT}"),
    }
    sentence = f"Use the found policy (trial 3): {IMAGE} & {MARKUP}."
    choice = Choice("policy", "trial 3", FOUND, sentence, True, "balanced")
    policies = {**BASELINES, "trial 3": FOUND}
    front = build_front(
        [Candidate(name, policies[name], name, result) for name, result in outcomes.items()],
        Verification(Proof(), verdicts, runs),
        choice,
        study_name=STUDY,
        task=f"tiny {SCRIPT}",
        target=f"GPU {CLOSING}",
        target_is_here=False,
        trials={name: number for number, name in enumerate(outcomes)},
        on_front=frozenset({"fp32", "trial 3"}),
        means={name: proof_means(found, Metric()) for name, found in runs.items()},
        worth=Worth(),
    )
    write_atomically(folder / "front.json", front.to_json())
    recommendation = Recommendation(choice="policy", sentence=sentence, provisional=True)
    units = {unit: UnitEvidence(precision="autocast", reason=f"decision {CLOSING}") for unit in UNITS}
    FOUND.replace(recommendation=recommendation, evidence=Evidence(arm="trial 3", units=units)).save(
        folder / "policy.json"
    )
    _profile().save(folder / "profile.json")


def _profile() -> Profile:
    cost = {
        "fp32": PrecisionCost(seconds=4e-3, peak_bytes=float(GIB)),
        "fp16": PrecisionCost(seconds=1e-3, peak_bytes=1.0),
    }
    unit = UnitProfile(
        activations=ExponentHistogram(counts={-1: 3, 0: 1}, maximum=1.5),
        activation_gradients=ExponentHistogram(counts={-30: 1, -20: 3}, maximum=1e-6),
        half={"fp16": HalfError(forward=1e-3), "bf16": HalfError(forward=8e-3)},
        costs={**cost, "autocast": PrecisionCost(seconds=2e-3, peak_bytes=GIB / 2)},
    )
    return Profile(
        study_name=STUDY,
        num_steps=2,
        watched_steps=[1, 2],
        losses=[2.0, 1.9],
        gradient_maxima=[1.0, 1.0],
        units=dict.fromkeys(UNITS, unit),
        step_seconds={"fp32": 17e-3, "autocast": 8e-3, "fp16": 4e-3},
        peak_bytes={"fp32": 4.0 * GIB},
        target="a100-80",
    )
