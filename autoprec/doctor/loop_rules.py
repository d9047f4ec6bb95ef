"""Troubles of the loop: parameters in half, an eps of 0, lost weights, a grad scaler that is misused."""

from __future__ import annotations

from collections.abc import Iterator

from autoprec.doctor.finding import Finding, dtype_name, names_of
from autoprec.doctor.observations import Observations

__all__ = ["misuse", "parameters"]


MAX_LOST_UPDATES = 0.25
"""Of the elements of one parameter that have a gradient."""


def parameters(seen: Observations) -> Iterator[Finding]:
    """Find parameters in half, updates that change nothing, an eps of 0, and weights that are lost."""
    if seen.half_parameters:
        names = list(seen.half_parameters)
        dtype = dtype_name(next(iter(seen.half_parameters.values())))
        yield Finding(
            "half parameters",
            names[0].rpartition(".")[0],
            f"{len(names)} trainable parameters are {dtype}: {names_of(names)}",
            "updates smaller than the last place of half are lost"
            + (", and GradScaler refuses FP16 gradients" if dtype == "float16" else ""),
            "keep the model in FP32 (no model.half()) and take autocast or autoprec.apply_policy",
        )
    lost = {name: own for name, own in seen.updates.items() if own.share >= MAX_LOST_UPDATES}
    if lost:
        name, worst = max(lost.items(), key=lambda item: item[1].num_lost)
        dtype = dtype_name(seen.half_parameters[name]) if name in seen.half_parameters else "half"
        yield Finding(
            "lost updates",
            name.rpartition(".")[0],
            f"{worst.share:.0%} of the updates of {name} changed nothing in {dtype}"
            + (f"; also of {names_of([other for other in lost if other != name])}" if len(lost) > 1 else ""),
            "a step below half of the last place is rounded away: 1 in 512 of a weight in bfloat16, 1 in 4096 in"
            " float16; norms, whose weights are near 1, stand still first",
            "FP32 parameters: autocast or autoprec.apply_policy computes in half and keeps them",
        )
    for optimizer, eps in seen.zero_eps.items():
        yield Finding(
            "eps is 0",
            "",
            f"eps {eps:g} of {optimizer} is 0 in the dtype of its state",
            "a second moment that is 0 divides by 0: the weights become NaN or inf",
            "FP32 parameters; or an eps of 1e-4 and above in FP16",
        )
    for name, step in list(seen.poisoned_parameters.items())[:1]:
        yield Finding(
            "lost weights",
            name.rpartition(".")[0],
            f"{name} is not finite since step {step}",
            "nothing learned before remains, and no later step mends it",
            "start again from a checkpoint, with what is found above changed",
        )


def misuse(seen: Observations) -> Iterator[Finding]:
    """Find what a loop does in the wrong order, or never."""

    def found(name: str, what: str, why: str, change: str) -> Finding:
        return Finding(name, "", what, why, change)

    if seen.clipped_while_scaled:
        steps = seen.clipped_while_scaled
        yield found(
            "clipped before unscale_",
            f"{len(steps)} of {seen.num_steps} steps clipped gradients that were still multiplied by the loss scale",
            "the limit is compared with gradients 65536 times too large: nearly every step is cut to almost nothing",
            "call scaler.unscale_(optimizer) before clip_grad_norm_ or clip_grad_value_",
        )
    if seen.stepped_while_scaled:
        yield found(
            "stepped on scaled gradients",
            f"{len(seen.stepped_while_scaled)} steps were taken by optimizer.step() while gradients were still scaled",
            "the update is as many times too large as the loss scale, and overflows are not skipped",
            "call scaler.step(optimizer) instead of optimizer.step()",
        )
    if seen.num_scaler_steps > 1 and not seen.num_updates:
        yield found(
            "scaler without update",
            f"scaler.step was called {seen.num_scaler_steps} times and scaler.update never",
            "the scale never falls after an overflow, and torch refuses a second step",
            "call scaler.update() once after the steps of all optimizers",
        )
    if seen.num_backwards > 1 and seen.num_scaled and not seen.num_steps:
        yield found(
            "no steps",
            f"{seen.num_backwards} backward passes of a scaled loss, and no optimizer stepped",
            "nothing is learned",
            "call scaler.step(optimizer) and scaler.update()",
        )
    if seen.stepped_on_non_finite:
        step, name = next(iter(seen.stepped_on_non_finite.items()))
        yield Finding(
            "stepped on non-finite gradients",
            name.rpartition(".")[0],
            f"step {step} was taken while the gradient of {name} was not finite",
            "the weights become NaN",
            "let a GradScaler take the step: it skips these",
        )
