"""The plan of a proof: margin, looks, steps, seeds and the chance to err, all fixed before the first trial."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from autoprec.errors import UsageError
from autoprec.trials.outcome import TrialSettings

__all__ = ["FIRST_SEED", "Proof", "build_proof"]

FIRST_SEED = 1_000
"""Distance between the seed of the trials and the first seed of the proof: no trial used these."""
FIRST_LOOK = 4
LIMITS = ("max_steps", "max_seconds")
"""How far a proof may go before it gives up; they change no run and no test, so they are no part of an identity."""


@dataclass(frozen=True, slots=True)
class Proof:
    """The plan of a proof; part of the study's identity, so that it is fixed before the first trial.

    Attributes:
        margin: how much worse than FP32 the metric may be, in its own units; None: relative, by `max_lost_share`.
        max_lost_share: share of what FP32 gained over its start weights that an arm may lose: of the metric where
            `margin` is None, and of the held-out loss.
        looks: numbers of seeds after which the verdicts are taken; each has an equal share of `alpha` (Bonferroni).
        num_steps: steps of the shortest runs, the learning rate falling to zero. Where FP32 gains too little in them
            for the margin to mean something, they are doubled.
        max_steps: steps of the longest runs that are tried.
        max_seconds: runs are not made longer where the arms could not be trained in this time.
        alpha: chance that any arm which is worse than the margin is called proved, over all looks and arms together.
        arm_share: part of what is left of a look's error that an arm may spend, as `Shares` hands it out; 1 where
            one arm alone is proved.
        sensitivity: FP32's own gain over its start has to be shown to be at least this many margins. Three, so that
            an arm at the margin still has most of what there was to learn.
        min_loss_gain: share of the start's held-out loss that FP32 must take off, below which the loss has not moved
            enough to be compared. From docs/horizon.md.
        loss_margin: how far the held-out loss may lie above FP32's, relative to it, before that alone refutes an arm;
            the only test of the loss where FP32 did not lower it.
        max_half: largest half value that a forward pass may reach; beyond it an arm is refuted, since longer training
            and other data reach further. A quarter of FP16's largest number.
        first_seed: distance between the seed of the trials and the first seed of the proof.
    """

    margin: float | None = None
    max_lost_share: float = 0.1
    looks: tuple[int, ...] = (4, 8)
    num_steps: int = 40
    max_steps: int = 320
    max_seconds: float = 900.0
    alpha: float = 0.05
    arm_share: float = 0.8
    sensitivity: float = 3.0
    min_loss_gain: float = 0.05
    loss_margin: float = 0.25
    max_half: float = 65504.0 / 4
    first_seed: int = FIRST_SEED

    def __post_init__(self) -> None:
        if self.margin is not None and not 0 < self.margin < float("inf"):
            raise UsageError(f"margin is {self.margin}; a positive number in units of the metric is needed")
        if self.max_steps < 2:
            raise UsageError(f"proof_steps is {self.max_steps}; at least 2")
        if not 0 < self.max_seconds < float("inf"):
            raise UsageError(f"proof_time is {self.max_seconds}; a positive number of seconds is needed")

    @property
    def max_seeds(self) -> int:
        return self.looks[-1]

    @property
    def alpha_per_look(self) -> float:
        return self.alpha / len(self.looks)

    @property
    def lengths(self) -> Iterator[int]:
        """Steps of the runs that are tried, one after the other: each twice the one before, up to `max_steps`."""
        steps = min(self.num_steps, self.max_steps)
        while steps <= self.max_steps:
            yield steps
            steps *= 2

    @property
    def identity(self) -> dict[str, Any]:
        """What decides the verdicts, as JSON values."""
        return {name: value for name, value in dataclasses.asdict(self).items() if name not in LIMITS}

    def settings(self, trial: TrialSettings, index: int, num_steps: int | None = None) -> TrialSettings:
        """Return how the run on unused seed number `index` is made; None takes the shortest length."""
        steps = self.num_steps if num_steps is None else num_steps
        warmup = min(trial.warmup_steps, steps - 1)
        return trial.model_copy(
            update={
                "seed": trial.seed + self.first_seed + index,
                "warmup_steps": warmup,
                "measured_steps": steps - warmup,
                "anneal": True,
                "watch_headroom": True,
            }
        )


def build_proof(
    margin: float | None = None,
    max_seeds: int | None = None,
    *,
    max_steps: int | None = None,
    max_seconds: float | None = None,
    trial_steps: int = 0,
    num_steps: int | None = None,
    arm_share: float | None = None,
    first_seed: int = FIRST_SEED,
) -> Proof:
    """Return a proof whose looks are after 4 seeds, at each doubling and after `max_seeds`; None keeps the defaults.

    Args:
        trial_steps: a run of the proof is no shorter than a trial.

    Raises:
        UsageError: fewer than 2 seeds, which have no spread.
    """
    if max_seeds is not None and max_seeds < 2:
        raise UsageError(f"max_seeds is {max_seeds}; a proof needs at least 2")
    plain = Proof()
    last = plain.max_seeds if max_seeds is None else max_seeds
    doublings = [FIRST_LOOK * 2**k for k in range(last.bit_length()) if FIRST_LOOK * 2**k < last]
    shortest = max(plain.num_steps, trial_steps) if num_steps is None else num_steps
    return Proof(
        margin=margin,
        looks=(*doublings, last),
        num_steps=shortest,
        max_steps=max(plain.max_steps, shortest) if max_steps is None else max_steps,
        max_seconds=plain.max_seconds if max_seconds is None else max_seconds,
        arm_share=plain.arm_share if arm_share is None else arm_share,
        first_seed=first_seed,
    )
