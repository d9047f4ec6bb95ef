"""The result of one trial, as data: it crosses processes and is stored in the study as JSON."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from autoprec.errors import UsageError
from autoprec.policy import Number
from autoprec.probes.ranges import ExponentHistogram
from autoprec.trials.aborting import AbortRules

__all__ = ["PRECISION_ENDS", "EndKind", "EndRanges", "Headroom", "Outcome", "TrialSettings", "NonFinite"]

EndKind = Literal[
    "ok",
    "out_of_memory",
    "non_finite_loss",
    "scale_collapsed",
    "no_step_taken",
    "non_finite_buffer",
    "unsupported",
    "timeout",
    "aborted",
    "crashed",
    "user_error",
]

PRECISION_ENDS: frozenset[EndKind] = frozenset(
    {"non_finite_loss", "scale_collapsed", "no_step_taken", "non_finite_buffer", "aborted"}
)
"""Ends that speak against a precision. The others (time, memory, a crash, a refused operator, the task's own error) say
nothing of how a policy trains, and are never told as lost accuracy."""


class TrialSettings(BaseModel):
    """How a trial is run. Everything here decides the numbers and is part of the study's fingerprint.

    `gpu` names the target for predicted throughput where the device is a CPU. `emulate` None means: on a CPU, yes.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    seed: int = 0
    device: str = "cpu"
    emulate: bool | None = None
    gpu: str = "a100-80"
    warmup_steps: int = Field(default=8, ge=0)
    measured_steps: int = Field(default=20, ge=1)
    batchnorm_batches: int = Field(default=8, ge=0)
    evaluate_under_policy: bool = False
    anneal: bool = False
    """Let the learning rate fall to zero over the run (verification); a task's own scheduler wins."""
    perturbation: float = Field(default=0.0, ge=0)
    """Move each start weight by up to this share of itself, at random: shows how far two equal trainings part."""
    measure_start: bool = False
    """Evaluate the start weights too, in FP32 (the reference of a verification): what training gained is measured."""
    watch_end: bool = False
    """Watch the ranges of one more step at the trained weights (the reference of a verification)."""
    watch_headroom: bool = False
    """Note how near the forward passes come to the end of FP16 (verification)."""
    abort: AbortRules | None = None
    """When to end before the last step; a search's trials but the baselines have some, runs of a proof none."""
    num_processes: int = Field(default=1, ge=1)
    """Processes that train together by DistributedDataParallel, a GPU each; each takes a batch of its own a step."""

    def with_steps(self, steps: int | None) -> TrialSettings:
        """Return the settings for that many optimizer steps, the warm-up included; None leaves them.

        Raises:
            UsageError: below 2.
        """
        if steps is None:
            return self
        if steps < 2:
            raise UsageError(f"steps is {steps}; at least 2 for a trial, a warm-up step and one that is measured")
        warmup = min(self.warmup_steps, max(1, steps // 3))
        return self.model_copy(update={"warmup_steps": warmup, "measured_steps": steps - warmup})


class NonFinite(BaseModel):
    """The first place where a value was not finite."""

    model_config = ConfigDict(frozen=True)

    step: int
    module: str
    what: str


class Headroom(BaseModel):
    """The largest finite half value of all forward passes, and the module in whose code it came up."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)

    largest: float
    module: str


class EndRanges(BaseModel):
    """What flows through a model at its trained weights, in FP32: all gradients, and the largest activation."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)

    gradients: ExponentHistogram
    largest_activation: float
    module: str


class Outcome(BaseModel):
    """What one trial gave. Numbers that were not obtained are None; no field is ever NaN or infinite."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)

    kind: EndKind
    message: str = ""
    step: int | None = None
    peak_memory_bytes: Number | None = None
    memory_by_category: dict[str, float] = Field(default_factory=dict)
    throughput_samples_per_second: Number | None = None
    throughput_tokens_per_second: Number | None = None
    """Where the task counts tokens."""
    launch_share: float | None = None
    """Of the predicted step, what the host's launches take; near 1 no precision makes it faster."""
    autocast_here: Number | None = None
    """Samples per second of stock autocast on the same device, timed shortly before; of trials of a worker."""
    throughput_over_autocast: float | None = None
    accuracy: Number | None = None
    eval_loss: Number | None = None
    start_accuracy: Number | None = None
    """At the start weights of the same seed, where that was asked for; None too where it was not finite."""
    start_eval_loss: Number | None = None
    train_losses: list[float] = Field(default_factory=list)
    num_steps_taken: int = 0
    num_steps_skipped: int = 0
    num_steps_planned: int = 0
    """More than were taken and skipped where the trial ended early."""
    scale_history: list[float] = Field(default_factory=list)
    grad_norms: list[float | None] = Field(default_factory=list)
    """Norm of the unscaled gradients at each step; None where it was not finite."""
    first_non_finite: NonFinite | None = None
    headroom: Headroom | None = None
    """None where it was not watched, or where nothing ran in FP16."""
    end_ranges: EndRanges | None = None
    """Where they were asked for."""
    notes: list[str] = Field(default_factory=list)
    """What a reader must know of these numbers (batches left out, how an estimate was made)."""
    stderr_tail: str = ""
    traceback: str = ""
    wall_seconds: float = 0.0
    phase_seconds: dict[str, float] = Field(default_factory=dict)
    """Parts of `wall_seconds`: `training`, `evaluation`, `target` (memory and throughput of the target shape)."""
    step_seconds_here: float | None = None
    """Median time of a step on this machine, for planning; not the throughput of the target."""

    @property
    def is_ok(self) -> bool:
        return self.kind == "ok"

    @property
    def blames_precision(self) -> bool:
        """Whether the run ended for a reason that speaks against its precision."""
        return self.kind in PRECISION_ENDS

    @property
    def skip_rate(self) -> float:
        """The share of the planned steps that was skipped: of a trial that ended early at least that."""
        steps = max(self.num_steps_taken + self.num_steps_skipped, self.num_steps_planned)
        return self.num_steps_skipped / steps if steps else 0.0
