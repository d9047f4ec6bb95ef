"""Honest refusal: with a margin far below the noise the answer must be inconclusive, with nothing recommended."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from autoprec.policy import load_policy
from autoprec.search.proof import Proof
from proof_studies.networks import digits_task
from proof_studies.running import Finding, Part, search

__all__ = ["REFUSAL"]

MARGIN = 0.002


def _study(number: int, folder: Path) -> Finding:
    task = digits_task("noisy", ["plain"] * 3, lr=0.5)
    result = search(task, folder, seed=number, n_trials=6, proof=Proof(margin=MARGIN))
    written = load_policy(folder / "policy.json")
    assert written.recommendation is not None
    return {
        "is_conclusive": result.is_conclusive,
        "choice": written.recommendation.choice,
        "default": written.default,
        "noise": result.verification.noise,
        "num_seeds": result.verification.num_seeds,
    }


def _summary(findings: Sequence[Finding]) -> list[str]:
    refused = sum(
        not finding["is_conclusive"] and finding["choice"] == "inconclusive" and finding["default"] == "fp32"
        for finding in findings
    )
    noises = [finding["noise"] for finding in findings if finding["noise"] is not None]
    span = f" (FP32 against itself: {min(noises):.4f} to {max(noises):.4f})" if noises else ""
    return [f"refusal: {refused} of {len(findings)} searches with a margin of {MARGIN:g} are inconclusive{span}"]


REFUSAL = Part(5, _study, _summary)
