"""Troubles of values: overflow, losses that are not finite or in half, a falling scale, underflow, statistics."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from autoprec.doctor.finding import Finding, dtype_name, names_of, place_of
from autoprec.doctor.observations import Observations

__all__ = ["batchnorm", "half_loss", "half_softmax", "non_finite_loss", "overflow", "rounded", "scale", "underflow"]

MAX_SKIPPED_SHARE = 0.25
"""Of the second half of the steps. A scaler that starts at 65536 may skip the first few; later it should not."""
MIN_SKIPPED = 2
MAX_FLUSHED_SHARE = 0.03
"""Of a unit's gradients, by magnitude: what half rounds to 0 below that is noise beside what it keeps."""
HEADROOM = 16376.0
"""Two octaves below FP16's largest number, 65504."""


def overflow(seen: Observations) -> Iterator[Finding]:
    """Find the first module whose FP16 values stop being finite; else those near the end."""
    forward = [birth for birth in seen.births if not birth.backward and birth.dtype is torch.float16]
    if forward:
        first = forward[0]
        others = list(dict.fromkeys(birth.unit for birth in forward[1:] if birth.unit != first.unit))
        then = f"; later also in {names_of(others)}" if others else ""
        yield Finding(
            "overflow",
            first.unit,
            f"step {first.step}: {first.operator} gave {first.what} in FP16 from {first.cause}, in "
            f"{place_of(first.unit)}, before any other module{then}",
            "FP16 ends at 65504; what exceeds it makes loss and gradients inf or NaN, and no lower loss scale helps",
            f"keep {place_of(first.unit)} in FP32 (a policy with modules={{{first.unit!r}: 'fp32'}}), use BF16, or "
            "bring its values down",
        )
        return
    near = {unit: value for unit, value in seen.largest_half.items() if value >= HEADROOM}
    if near:
        unit, value = max(near.items(), key=lambda item: item[1])
        yield Finding(
            "little headroom",
            unit,
            f"the largest FP16 value is {value:.0f} of 65504, in {place_of(unit)}",
            "it overflows when it grows by less than two octaves",
            "keep that module in FP32 or use BF16",
            is_wrong=False,
        )


def non_finite_loss(seen: Observations) -> Iterator[Finding]:
    """Find a loss of inf or NaN, and the logarithm of 0 behind it."""
    bad = [(place, loss) for place, loss in enumerate(seen.losses) if loss != loss or abs(loss) == float("inf")]
    zero_log = next((b for b in seen.births if not b.backward and b.what == "-inf" and "log" in b.operator), None)
    if not bad and zero_log is None:
        return
    first = next((birth for birth in seen.births if not birth.backward), None)
    unit = zero_log.unit if zero_log is not None else first.unit if first is not None else ""
    where = f"; first in {place_of(unit)}" + (f" ({zero_log.operator} of 0)" if zero_log is not None else "")
    what = f"the loss is {bad[0][1]:g} at backward pass {bad[0][0] + 1}" if bad else "a logarithm gave -inf"
    yield Finding(
        "non-finite loss",
        unit,
        what + (where if zero_log is not None or first is not None else ""),
        "its gradients are NaN: every step is skipped, or the weights are lost",
        "take log_softmax or a loss on logits instead of the logarithm of a probability, with autocast off around it"
        if zero_log is not None
        else "see the first module that is not finite",
    )


def scale(seen: Observations) -> Iterator[Finding]:
    """Find a loss scale that still falls in the second half of the steps."""
    half = seen.num_steps // 2
    late = sum(step > half for step in seen.skipped)
    if late < MIN_SKIPPED or late <= MAX_SKIPPED_SHARE * (seen.num_steps - half):
        return
    backward = next((birth for birth in seen.births if birth.backward), None)
    unit = backward.unit if backward is not None else ""
    place = f"; gradients stop being finite in {place_of(unit)} ({backward.operator})" if backward is not None else ""
    yield Finding(
        "falling scale",
        unit,
        f"{len(seen.skipped)} of {seen.num_steps} steps skipped, scale {seen.scales[0]:g} to {seen.scales[-1]:g}"
        + place,
        "a skipped step learns nothing; a scale that reaches 0 writes NaN into the weights",
        "mend an overflow of the forward pass where there is one; else a lower init_scale, or that module in FP32",
    )


def underflow(seen: Observations) -> Iterator[Finding]:
    """Find the unit that loses most of its gradients to rounding."""
    lost = {unit: f for unit, f in seen.flushed.items() if f.magnitude_share >= MAX_FLUSHED_SHARE}
    if not lost or torch.float16 not in seen.used_half:
        return
    unit, worst = max(lost.items(), key=lambda item: item[1].magnitude_share)
    others = [name for name in lost if name != unit]
    scaled = f"at a loss scale of {seen.scales[-1]:g}" if seen.scales else "without a grad scaler"
    yield Finding(
        "underflow",
        unit,
        f"{worst.share:.0%} of the gradient values of {place_of(unit)} ({worst.magnitude_share:.0%} of their "
        f"magnitude) round to 0 in FP16, {scaled}" + (f"; also in {names_of(others)}" if others else ""),
        "what rounds to 0 is not learned from: the accuracy falls and nothing fails",
        "scale the loss: torch.amp.GradScaler with its init_scale of 65536"
        if not seen.scales
        else "a larger init_scale, or that module in FP32 or BF16",
    )


def half_loss(seen: Observations) -> Iterator[Finding]:
    """Find a loss that was computed in half."""
    for unit, operator in list(seen.half_losses.items())[:1]:
        yield Finding(
            "loss in half",
            unit,
            f"{operator} computed in half, in {place_of(unit)}",
            "FP16 has 3 decimal digits and ends at 65504: the loss is rounded, its sums overflow",
            "give the loss FP32: loss(output.float(), ...), or compute it under autocast, which does that",
        )
    dtypes = seen.loss_dtypes & {torch.float16, torch.bfloat16}
    if dtypes and not seen.half_losses:
        yield Finding(
            "loss in half",
            "",
            f"the loss that backward starts from is {dtype_name(next(iter(dtypes)))}",
            "it is rounded to 3 decimal digits, and scaling it overflows above 65504",
            "give the loss FP32: loss(output.float(), ...)",
        )


def half_softmax(seen: Observations) -> Iterator[Finding]:
    """Find softmax in half."""
    if seen.half_softmax:
        unit, dtype = next(iter(seen.half_softmax.items()))
        yield Finding(
            "softmax in half",
            unit,
            f"softmax computed in {dtype_name(dtype)} in {names_of(list(seen.half_softmax))}",
            "small probabilities round to 0 and their logarithm is -inf; a policy that was proved may do it on purpose",
            "autocast computes it in FP32; in a policy give that module 'autocast'",
            is_wrong=False,
        )


def rounded(seen: Observations) -> Iterator[Finding]:
    """Find whole numbers that a cast changed: positions, times, targets."""
    for unit, (dtype, value, became) in list(seen.rounded.items())[:1]:
        others = [name for name in seen.rounded if name != unit]
        limit = 256 if dtype is torch.bfloat16 else 2048
        yield Finding(
            "rounded positions",
            unit,
            f"a whole number, {value:g}, became {became:g} in {dtype_name(dtype)}, in {place_of(unit)}"
            + (f"; also in {names_of(others)}" if others else ""),
            f"{dtype_name(dtype)} knows all whole numbers up to {limit} only: neighbouring positions, times or targets"
            " become one",
            f"keep {place_of(unit)} in FP32, or embed positions from integers",
        )


def batchnorm(seen: Observations) -> Iterator[Finding]:
    """Find running statistics that are not finite, or in half."""
    for name, step in list(seen.poisoned_buffers.items())[:1]:
        unit = name.rpartition(".")[0]
        others = len({other.rpartition(".")[0] for other in seen.poisoned_buffers}) - 1
        yield Finding(
            "poisoned statistics",
            unit,
            f"{name} is not finite since step {step}" + (f", nor those of {others} other modules" if others else ""),
            "a scaler skips the step but not the running statistics: evaluation is NaN for good",
            "keep what comes before it from overflowing (FP32, or smaller values), then reset_running_stats()",
        )
    for name, dtype in list(seen.half_statistics.items())[:1]:
        yield Finding(
            "statistics in half",
            name,
            f"running statistics of {names_of(list(seen.half_statistics))} are {dtype_name(dtype)}",
            "an average that moves by a tenth stands still in half, and a variance overflows above 65504",
            f"keep normalization layers in FP32: module.float() for {name}",
        )
