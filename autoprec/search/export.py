"""policy.json: the recommended policy with its evidence. No path, host or user."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from autoprec.policy import (
    ArmEvidence,
    Evidence,
    GradScalerSettings,
    Number,
    Policy,
    Provenance,
    Recommendation,
    UnitEvidence,
    VerificationEvidence,
    parents_of,
    resolve_precisions,
)
from autoprec.profiling.profile import Profile
from autoprec.profiling.scaler_choice import ScaleWindow, scale_window
from autoprec.search.arms import FP32
from autoprec.search.fingerprint import Identity, versions
from autoprec.search.judging import Verdict
from autoprec.search.metric import Metric
from autoprec.search.plan import SearchPlan
from autoprec.search.profile_prior import Lessons, unit_figures
from autoprec.search.recommendation import Choice
from autoprec.search.statistics import interval
from autoprec.search.verification import Verification
from autoprec.search.worth import Candidate
from autoprec.tasks.options import training_options
from autoprec.tasks.protocol import TargetShape
from autoprec.trials.outcome import Outcome, TrialSettings

__all__ = [
    "exported_policy",
    "rechosen_policy",
    "arm_evidence",
    "end_window",
    "proof_means",
    "verification_evidence",
    "build_provenance",
]


def exported_policy(
    plan: SearchPlan,
    choice: Choice,
    candidates: Sequence[Candidate],
    verification: Verification,
    lessons: Lessons | None = None,
) -> Policy:
    """Return the recommended policy with model, evidence, provenance and recommendation."""
    training = training_options(plan.task)
    return choice.policy.replace(
        training=training if training.changed else None,
        model=plan.model,
        recommendation=_recommendation(choice),
        evidence=Evidence(
            arm=choice.name,
            compared_with=plan.present,
            arms=arm_evidence(candidates, verification),
            units=_unit_evidence(plan, choice, lessons or Lessons()),
            verification=verification_evidence(verification, lessons.profile if lessons else None),
        ),
        provenance=build_provenance(
            plan.trial,
            identity=plan.identity,
            task=plan.task.name,
            study_name=plan.study_name,
            target=plan.target,
            target_is_here=plan.target_is_here,
            shape=plan.task.target,
        ),
    )


def rechosen_policy(exported: Policy, choice: Choice) -> Policy:
    """Return what was chosen again, with model, evidence and provenance of the policy that the search exported."""
    evidence = exported.evidence or Evidence()
    precisions, _ = resolve_precisions(choice.policy, parents_of(evidence.units))
    units = {
        name: unit.model_copy(update={"precision": precisions[name], "reason": _reason(unit, choice)})
        for name, unit in evidence.units.items()
    }
    return choice.policy.replace(
        training=exported.training,
        model=exported.model,
        recommendation=_recommendation(choice),
        evidence=evidence.model_copy(update={"arm": choice.name, "units": units}),
        provenance=exported.provenance,
    )


def _reason(unit: UnitEvidence, choice: Choice) -> str:
    return unit.reason if unit.reason.startswith("pinned") else f"recommended: {choice.name}"


def _recommendation(choice: Choice) -> Recommendation:
    return Recommendation(
        choice=choice.kind, sentence=choice.sentence[:2_000], provisional=choice.provisional, prefer=choice.prefer
    )


def verification_evidence(verification: Verification, profile: Profile | None = None) -> VerificationEvidence:
    """Return what a proof did. With the profile the window of the loss scale covers the start weights, too."""
    window, largest = end_window(verification, profile), verification.end_activation
    metric, learned, proof = verification.metric, verification.learned, verification.proof
    gain = None if learned is None else learned.metric
    return VerificationEvidence(
        num_seeds=verification.num_seeds,
        num_steps=verification.num_steps,
        margin=verification.margin,
        max_lost_share=None if proof.margin is not None else proof.max_lost_share,
        metric=metric.name[:200],
        metric_direction="maximize" if metric.higher_is_better else "minimize",
        start_accuracy=None if gain is None else gain.start * (1 if metric.higher_is_better else -1),
        gain=None if gain is None else gain.interval.mean,
        gain_low=None if gain is None else gain.interval.low,
        sensitive=None if learned is None else learned.is_shown,
        end_scale_low=None if window is None else window.low,
        end_scale_high=None if window is None else window.high,
        end_largest_activation=None if largest is None else largest[0],
        end_module="" if largest is None else largest[1][:500],
        provable_margin=verification.provable_margin,
        loss_margin=verification.proof.loss_margin,
        noise=verification.noise,
        verdicts={name: verdict.kind for name, verdict in verification.verdicts.items()},
    )


def end_window(verification: Verification, profile: Profile | None) -> ScaleWindow | None:
    """Return the safe loss scales for the gradients of trained and start weights together; None without the former."""
    gradients = verification.end_gradients
    if gradients is None or not gradients.num_values:
        return None
    return scale_window(gradients if profile is None else gradients + profile.gradients)


def arm_evidence(candidates: Sequence[Candidate], verification: Verification) -> dict[str, ArmEvidence]:
    """Return each arm's memory and throughput from its trial, accuracy and loss as means over the proof's seeds.

    Never the accuracy of a trial: beside those of the proof it would compare two experiments.
    """
    reference = next(c for c in candidates if c.name == FP32)
    return {c.name: _evidence(c, reference, verification) for c in candidates}


def _evidence(candidate: Candidate, reference: Candidate, verification: Verification) -> ArmEvidence:
    means = proof_means(verification.outcomes.get(candidate.name, {}), verification.metric)
    verdict = verification.verdicts.get(candidate.name)
    ratios = candidate.ratios(reference)
    return ArmEvidence(
        peak_memory_bytes=candidate.outcome.peak_memory_bytes,
        throughput_samples_per_second=candidate.outcome.throughput_samples_per_second,
        throughput_tokens_per_second=candidate.outcome.throughput_tokens_per_second,
        memory_ratio=ratios.memory,
        throughput_ratio=ratios.throughput,
        accuracy=means.get("accuracy"),
        eval_loss=means.get("eval_loss"),
        note=_note(candidate, verdict)[:2_000],
    )


def _note(candidate: Candidate, verdict: Verdict | None) -> str:
    if not candidate.outcome.is_ok:
        return f"{candidate.outcome.kind}: {candidate.outcome.message}"
    return "not verified" if verdict is None else f"{verdict.kind}: {verdict.reason}"


def proof_means(runs: Mapping[int, Outcome], metric: Metric) -> dict[str, Number]:
    """Return the metric, under its own sign, and the loss over the seeds of a proof: those that every run gave."""
    accuracy, loss = (_mean([getattr(run, name) for run in runs.values()]) for name in ("accuracy", "eval_loss"))
    means = {"accuracy": None if accuracy is None else metric.own(accuracy), "eval_loss": loss}
    return {name: mean for name, mean in means.items() if mean is not None}


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


def _unit_evidence(plan: SearchPlan, choice: Choice, lessons: Lessons) -> dict[str, UnitEvidence]:
    """Say for each unit of the decisions which precision it has and what decided it, with the profile's figures."""
    scale = choice.policy.grad_scaler.init_scale if choice.policy.grad_scaler else GradScalerSettings().init_scale
    found: dict[str, UnitEvidence] = {}
    precisions, _ = resolve_precisions(choice.policy, parents_of([*plan.model.modules, *_units(plan)]))
    for decision in plan.decisions:
        refused = "; ".join(f"{name}: {reason}" for name, reason in decision.reasons.items())
        for name in decision.units:
            precision = precisions[name]
            why = (
                f"decision {decision.name}, {choice.name}" if choice.kind == "policy" else f"recommended: {choice.name}"
            )
            reason = f"pinned ({refused})" if decision.is_pinned and refused else why
            if decision.name in lessons.reasons and choice.kind == "policy":
                reason = f"not searched: {lessons.reasons[decision.name]}"
            profile, dtype = lessons.profile, choice.policy.dtype
            figures = {} if profile is None else unit_figures(profile, name, precision, scale, dtype)
            found[name] = UnitEvidence(precision=precision, reason=reason[:2_000], **figures)
    return found


def _units(plan: SearchPlan) -> list[str]:
    return [name for decision in plan.decisions for name in decision.units]


def build_provenance(
    trial: TrialSettings,
    *,
    identity: Identity,
    task: str,
    study_name: str,
    target: str,
    target_is_here: bool,
    shape: TargetShape | None = None,
) -> Provenance:
    """Say where numbers come from: device or target, versions, settings, the batch and shape of the real run."""
    settings = {k: v for k, v in identity.items() if isinstance(v, bool | int | float | str) or v is None}
    if shape is not None:
        settings |= {"target_batch_size": shape.batch_size, "target_shape": shape.description[:200]}
    return Provenance(
        created=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        versions=versions(),
        device_type=trial.device.partition(":")[0],
        device_name=target if target_is_here else None,
        target_gpu=None if target_is_here else trial.gpu,
        emulated=not target_is_here,
        task=task,
        study_name=study_name,
        settings=settings,
    )
