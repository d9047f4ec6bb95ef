"""The plan of a proof: margin, looks, steps, seeds and the chance to err, all fixed before the first trial."""

from __future__ import annotations

from dataclasses import dataclass

from autoprec.errors import UsageError
from autoprec.trials.outcome import TrialSettings

__all__ = ["FIRST_SEED", "Proof", "build_proof", "proof_steps"]

FIRST_SEED = 1_000
"""Distance between the seed of the trials and the first seed of the proof: no trial used these."""
FIRST_LOOK = 4


@dataclass(frozen=True, slots=True)
class Proof:
    """The plan of a proof; part of the study's identity, so that it is fixed before the first trial.

    Attributes:
        margin: how much worse than FP32 the metric may be, in its own units.
        looks: numbers of seeds after which the verdicts are taken; each has an equal share of `alpha` (Bonferroni).
        num_steps: steps of each run, the learning rate falling to zero.
        alpha: chance that any arm which is worse than the margin is called proved, over all looks and arms together.
        arm_share: part of what is left of a look's error that an arm may spend, as `Shares` hands it out; 1 where
            one arm alone is proved.
        loss_margin: how far the held-out loss may lie above FP32's, relative to it, before that alone refutes an arm.
        max_half: largest half value that a forward pass may reach; beyond it an arm is refuted, since longer training
            and other data reach further. A quarter of FP16's largest number.
        first_seed: distance between the seed of the trials and the first seed of the proof.
    """

    margin: float = 0.05
    looks: tuple[int, ...] = (4, 8)
    num_steps: int = 40
    alpha: float = 0.05
    arm_share: float = 0.8
    loss_margin: float = 0.25
    max_half: float = 65504.0 / 4
    first_seed: int = FIRST_SEED

    def __post_init__(self) -> None:
        if not 0 < self.margin < float("inf"):
            raise UsageError(f"margin is {self.margin}; a positive number in units of the metric is needed")

    @property
    def max_seeds(self) -> int:
        return self.looks[-1]

    @property
    def alpha_per_look(self) -> float:
        return self.alpha / len(self.looks)

    def settings(self, trial: TrialSettings, index: int) -> TrialSettings:
        """Return how the run on unused seed number `index` is made."""
        return trial.model_copy(
            update={
                "seed": trial.seed + self.first_seed + index,
                "measured_steps": max(1, self.num_steps - trial.warmup_steps),
                "anneal": True,
                "watch_headroom": True,
            }
        )


def build_proof(
    margin: float | None = None,
    max_seeds: int | None = None,
    *,
    num_steps: int | None = None,
    arm_share: float | None = None,
    first_seed: int = FIRST_SEED,
) -> Proof:
    """Return a proof whose looks are after 4 seeds, at each doubling and after `max_seeds`; None keeps the defaults.

    Raises:
        UsageError: fewer than 2 seeds, which have no spread.
    """
    if max_seeds is not None and max_seeds < 2:
        raise UsageError(f"max_seeds is {max_seeds}; a proof needs at least 2")
    plain = Proof()
    last = plain.max_seeds if max_seeds is None else max_seeds
    doublings = [FIRST_LOOK * 2**k for k in range(last.bit_length()) if FIRST_LOOK * 2**k < last]
    return Proof(
        margin=plain.margin if margin is None else margin,
        looks=(*doublings, last),
        num_steps=plain.num_steps if num_steps is None else num_steps,
        arm_share=plain.arm_share if arm_share is None else arm_share,
        first_seed=first_seed,
    )


def proof_steps(trial: TrialSettings) -> int:
    """Return the steps of a proof's run: the default, or those of a trial where they are more."""
    return max(Proof().num_steps, trial.warmup_steps + trial.measured_steps)
