"""A/A: searches over a task where precision changes nothing must recommend no found policy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from autoprec.policy import Number, Policy
from autoprec.trials import TrialSettings, run_trial
from autoprec.trials.outcome import Outcome
from proof_studies.networks import BATCH, digits_task
from proof_studies.running import FP32, Finding, Part, counts, search

__all__ = ["SAME"]


def _study(number: int, folder: Path) -> Finding:
    """Run every policy as FP32 from start weights that its name moved by FP16's rounding error; time the steps here."""
    task = digits_task("same", ["plain"] * 3)

    def measure(policy: Policy, settings: TrialSettings) -> Outcome:
        rng = np.random.default_rng([sum(policy.to_json().encode()), settings.seed])
        size = settings.perturbation if policy == FP32 else 2.0**-11 * float(rng.uniform(0.5, 1))
        outcome = run_trial(task, FP32, settings.model_copy(update={"perturbation": size}))
        jitter = 1 + 2.0**-11 * float(rng.uniform(-1, 1))
        assert outcome.step_seconds_here is not None
        return outcome.model_copy(
            update={
                "peak_memory_bytes": Number(value=1e9 * jitter, kind="measured"),
                "throughput_samples_per_second": Number(value=BATCH / outcome.step_seconds_here, kind="measured"),
            }
        )

    prefer = ("balanced", "fastest")[number % 2]
    result = search(task, folder, seed=number, measure=measure, prefer=prefer, n_trials=8)
    num_found = sum(candidate.is_found for candidate in result.candidates)
    return {"choice": result.choice.kind, "num_finalists": num_found, "sentence": result.choice.sentence}


def _summary(findings: Sequence[Finding]) -> list[str]:
    choices = [finding["choice"] for finding in findings]
    with_finalists = sum(finding["num_finalists"] > 0 for finding in findings)
    return [
        f"A/A: {choices.count('policy')} of {len(choices)} searches recommend a found policy ({counts(choices)})",
        f"A/A: a found policy looked better in the trials of {with_finalists} of them and was proved beside FP32",
    ]


SAME = Part(100, _study, _summary)
