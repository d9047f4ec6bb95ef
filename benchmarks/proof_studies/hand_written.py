"""`verify` of two policies written by hand: one is worse than FP32 by twice the margin, one is equal to it."""

from __future__ import annotations

import functools
import shutil
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from autoprec import verify_policy
from autoprec.policy import Policy
from autoprec.search.proof import Proof
from autoprec.tasks import Task
from autoprec.trials import run_trial
from proof_studies.networks import digits_task
from proof_studies.running import FP32, GPU, Finding, Part, inline, trial_settings

__all__ = ["HAND_WRITTEN"]

WORSE = Policy(default="fp32", modules={"blocks.1.unit": "fp16"})
EQUAL = Policy(default="fp32", modules={"blocks.2.unit": "fp16", "head": "fp16"})
NUM_HARM_SEEDS = 40
HARM_SEED = 900_000


def _study(number: int, folder: Path) -> Finding:
    shutil.rmtree(folder, ignore_errors=True)
    task, harm = _task(), _harm()
    found = {}
    for name, policy in (("worse", WORSE), ("equal", EQUAL)):
        proof = verify_policy(
            policy,
            task,
            device="cpu",
            gpu=GPU,
            seed=1_000 * number,
            margin=harm / 2,
            with_autocast=False,
            output=folder,
            measure=inline(task),
        )
        found[name] = proof.verdict.kind
    return {"harm": harm, **found}


def _task() -> Task:
    return digits_task("faint", ["plain", "vanish", "plain"])


@functools.cache
def _harm() -> float:
    """Return what the worse policy loses of accuracy: the mean over seeds that no proof uses."""
    task, plan, trial = _task(), replace(Proof(), first_seed=HARM_SEED), trial_settings(0)
    differences = []
    for index in range(NUM_HARM_SEEDS):
        settings = plan.settings(trial, index)
        fp32, own = (run_trial(task, p, settings).accuracy for p in (FP32, WORSE))
        assert fp32 is not None
        assert own is not None
        differences.append(fp32.value - own.value)
    return statistics.fmean(differences)


def _summary(findings: Sequence[Finding]) -> list[str]:
    worse, equal = ([finding[name] for finding in findings] for name in ("worse", "equal"))
    harm = max((finding["harm"] for finding in findings), default=0.0)
    return [
        f"verify: the worse policy loses {harm:.4f} of accuracy (mean over {NUM_HARM_SEEDS} other seeds), the margin "
        "is half of that",
        f"verify: it fails in {sum(kind != 'proved' for kind in worse)} of {len(worse)} ({worse.count('refuted')} "
        f"refuted, {worse.count('open')} open); the equal one passes in {equal.count('proved')} of {len(equal)}",
    ]


HAND_WRITTEN = Part(20, _study, _summary)
