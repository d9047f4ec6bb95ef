"""The files of a search: policy.json with its evidence, front.json with the whole front. No path, host or user."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from autoprec.policy import (
    ArmEvidence,
    Evidence,
    Number,
    Policy,
    Provenance,
    Recommendation,
    UnitEvidence,
    VerificationEvidence,
)
from autoprec.search.arms import FP32
from autoprec.search.fingerprint import versions
from autoprec.search.plan import SearchPlan
from autoprec.search.recommendation import PREFERENCES, Candidate, Choice, rank
from autoprec.search.statistics import interval
from autoprec.search.study import OBJECTIVES, TrialRecord
from autoprec.search.verification import Verification
from autoprec.trials.outcome import Outcome

__all__ = ["exported_policy", "front_document", "arm_evidence", "to_json"]


def exported_policy(
    plan: SearchPlan, choice: Choice, candidates: Sequence[Candidate], verification: Verification
) -> Policy:
    """Return the recommended policy with model, evidence, provenance and recommendation."""
    return choice.policy.replace(
        model=plan.model,
        recommendation=Recommendation(
            choice=choice.kind, sentence=choice.sentence, provisional=choice.provisional, prefer=choice.prefer
        ),
        evidence=Evidence(
            arms=arm_evidence(candidates, verification),
            units=_unit_evidence(plan, choice),
            verification=VerificationEvidence(
                num_seeds=verification.num_seeds,
                num_steps=verification.proof.num_steps,
                margin=verification.proof.margin,
                provable_margin=verification.provable_margin,
                verdicts={name: verdict.kind for name, verdict in verification.verdicts.items()},
            ),
        ),
        provenance=_provenance(plan),
    )


def arm_evidence(candidates: Sequence[Candidate], verification: Verification) -> dict[str, ArmEvidence]:
    """Return each arm's memory and throughput from its trial, accuracy and loss as means over the proof's seeds."""
    return {c.name: _evidence(c, verification) for c in candidates}


def _evidence(candidate: Candidate, verification: Verification) -> ArmEvidence:
    runs = list(verification.outcomes.get(candidate.name, {}).values())
    verdict = verification.verdicts.get(candidate.name)
    return ArmEvidence(
        peak_memory_bytes=candidate.outcome.peak_memory_bytes,
        throughput_samples_per_second=candidate.outcome.throughput_samples_per_second,
        accuracy=_mean([run.accuracy for run in runs]),
        eval_loss=_mean([run.eval_loss for run in runs]),
        note="not verified" if verdict is None else f"{verdict.kind}: {verdict.reason}",
    )


def _mean(numbers: Sequence[Number | None]) -> Number | None:
    """Return the mean over seeds with its two-sided 95 % interval; None where a run gave no number."""
    known = [number for number in numbers if number is not None]
    if not known or len(known) != len(numbers):
        return None
    values = [number.value for number in known]
    if len(values) < 2:
        return known[0]
    found = interval(values, alpha=0.025)
    return Number(value=found.mean, kind=known[0].kind, low=found.low, high=found.high)


def _unit_evidence(plan: SearchPlan, choice: Choice) -> dict[str, UnitEvidence]:
    """Say for each unit of the decisions which precision it has and what decided it."""
    found: dict[str, UnitEvidence] = {}
    for decision in plan.decisions:
        refused = "; ".join(f"{name}: {reason}" for name, reason in decision.reasons.items())
        for name in decision.units:
            precision = choice.policy.modules.get(name, choice.policy.default)
            why = f"decision {decision.name}" if choice.kind == "policy" else f"recommended: {choice.name}"
            reason = f"pinned ({refused})" if decision.is_pinned and refused else why
            found[name] = UnitEvidence(precision=precision, reason=reason[:2_000])
    return found


def _provenance(plan: SearchPlan) -> Provenance:
    return Provenance(
        created=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        versions=versions(),
        device_type=plan.trial.device.partition(":")[0],
        device_name=plan.target if plan.target_is_here else None,
        target_gpu=None if plan.target_is_here else plan.trial.gpu,
        emulated=not plan.target_is_here,
        task=plan.task.name,
        study_name=plan.study_name,
        settings={k: v for k, v in plan.identity.items() if isinstance(v, bool | int | float | str) or v is None},
    )


def front_document(
    plan: SearchPlan, front: Sequence[TrialRecord], records: Sequence[TrialRecord], choice: Choice
) -> dict[str, Any]:
    """Return the Pareto front as JSON data: each policy with its numbers and kinds, and a pick for each preference."""
    fp32 = next(record for record in records if record.arm == FP32)
    reference = Candidate(FP32, fp32.policy, fp32.key, fp32.outcome)
    members = [Candidate(record.label, record.policy, record.key, record.outcome) for record in front]
    picks = {prefer: rank(members, reference, prefer)[0].name for prefer in PREFERENCES} if members else {}
    return {
        "schema_version": 1,
        "study_name": plan.study_name,
        "objectives": dict(OBJECTIVES),
        "target": plan.target,
        "recommended": choice.name,
        "picks": picks,
        "front": [_front_member(record) for record in front],
    }


def _front_member(record: TrialRecord) -> dict[str, Any]:
    return {
        "trial": record.number,
        "name": record.label,
        "numbers": _numbers(record.outcome),
        "policy": record.policy.model_dump(mode="json", exclude_none=True),
    }


def _numbers(outcome: Outcome) -> Mapping[str, Any]:
    names = (*OBJECTIVES, "eval_loss")
    found = {name: getattr(outcome, name) for name in names}
    return {name: n.model_dump(mode="json", exclude_none=True) for name, n in found.items() if n is not None}


def to_json(document: Mapping[str, Any]) -> str:
    return json.dumps(document, indent=2, allow_nan=False) + "\n"
