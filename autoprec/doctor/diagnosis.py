"""From what was seen to findings: what is wrong, in which layer, why it matters and what to change. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from autoprec.doctor.observations import Observations

__all__ = ["Finding", "diagnose", "summarise"]

MAX_SKIPPED_SHARE = 0.25
"""Of the second half of the steps. A scaler that starts at 65536 may skip the first few; later it should not."""
MIN_SKIPPED = 2
MAX_FLUSHED_SHARE = 0.03
"""Of a unit's gradients, by magnitude: what half rounds to 0 below that is noise beside what it keeps."""
MAX_FP32_SHARE = 0.6
MIN_SAVED_BYTES = 2**20
"""Below a MiB of activations memory is no reason for half."""
MAX_PADDED_SHARE = 0.2
MAX_CAST_SHARE = 0.5
HEADROOM = 16376.0
"""Two octaves below FP16's largest number, 65504."""
NUM_NAMES = 4


@dataclass(frozen=True, slots=True)
class Finding:
    """One trouble.

    Attributes:
        name: what it is called, such as "overflow".
        unit: the module or parameter; "" is the model itself or the loop.
        seen: what was seen, with numbers.
        why: why it matters.
        change: what to change.
        is_wrong: True where training is in danger; False for what only costs memory or time.
    """

    name: str
    unit: str
    seen: str
    why: str
    change: str
    is_wrong: bool = True


def diagnose(seen: Observations) -> list[Finding]:
    """Return all findings, what endangers the training first; empty where nothing is wrong."""
    found = [finding for rule in RULES for finding in rule(seen)]
    if seen.error and not found:
        found.append(
            Finding(
                "error", "", f"the training raised {seen.error}", "it ended before its steps were done", "mend that"
            )
        )
    return sorted(found, key=lambda finding: not finding.is_wrong)


def summarise(seen: Observations) -> dict[str, str]:
    """Return the plain facts of the run, in the order in which they are read."""
    facts = {"steps": f"{seen.num_steps} tried, {len(seen.skipped)} skipped by the grad scaler"}
    if seen.losses:
        facts["loss"] = f"{seen.losses[0]:.4g} to {seen.losses[-1]:.4g}"
    if seen.scales:
        facts["loss scale"] = f"{seen.scales[0]:g} to {seen.scales[-1]:g}, lowest {min(seen.scales):g}"
    if seen.grad_norms:
        facts["gradient norm"] = f"{min(seen.grad_norms):.3g} to {max(seen.grad_norms):.3g} as the optimizer sees it"
    if seen.largest_half:
        unit, value = max(seen.largest_half.items(), key=lambda item: item[1])
        facts["largest FP16 value"] = f"{value:.4g} of 65504, in {_shown(unit)}"
    worst = max(seen.flushed.items(), key=lambda item: item[1].share, default=None)
    if worst is not None and worst[1].num_flushed:
        lost = f"{worst[1].share:.1%} of values ({worst[1].magnitude_share:.2%} of magnitude)"
        facts["gradients that half rounds to 0"] = f"at most {lost}, in {_shown(worst[0])}"
    fp32, half = (sum(counts[kind] for counts in seen.saved_bytes.values()) for kind in ("fp32", "half"))
    if fp32 + half:
        facts["kept for backward"] = f"{half / 2**20:.2f} MiB in half, {fp32 / 2**20:.2f} MiB in FP32"
    if seen.num_casts and seen.num_steps:
        share = seen.cast_seconds / seen.step_seconds
        facts["casts"] = f"{seen.num_casts / seen.num_steps:.0f} a step, {share:.0%} of its predicted time"
    return facts


def _overflow(seen: Observations) -> Iterator[Finding]:
    forward = [birth for birth in seen.births if not birth.backward and birth.dtype is torch.float16]
    if forward:
        first = forward[0]
        others = list(dict.fromkeys(birth.unit for birth in forward[1:] if birth.unit != first.unit))
        then = f"; later also in {_names(others)}" if others else ""
        yield Finding(
            "overflow",
            first.unit,
            f"step {first.step}: {first.operator} gave {first.what} in FP16 from {first.cause}, in "
            f"{_shown(first.unit)}, before any other module{then}",
            "FP16 ends at 65504; what exceeds it makes loss and gradients inf or NaN, and no lower loss scale helps",
            f"keep {_shown(first.unit)} in FP32 (a policy with modules={{{first.unit!r}: 'fp32'}}), use BF16, or bring "
            "its values down",
        )
        return
    near = {unit: value for unit, value in seen.largest_half.items() if value >= HEADROOM}
    if near:
        unit, value = max(near.items(), key=lambda item: item[1])
        yield Finding(
            "little headroom",
            unit,
            f"the largest FP16 value is {value:.0f} of 65504, in {_shown(unit)}",
            "it overflows when it grows by less than two octaves",
            "keep that module in FP32 or use BF16",
            is_wrong=False,
        )


def _non_finite_loss(seen: Observations) -> Iterator[Finding]:
    bad = [(place, loss) for place, loss in enumerate(seen.losses) if loss != loss or abs(loss) == float("inf")]
    zero_log = next((b for b in seen.births if not b.backward and b.what == "-inf" and "log" in b.operator), None)
    if not bad and zero_log is None:
        return
    first = next((birth for birth in seen.births if not birth.backward), None)
    unit = zero_log.unit if zero_log is not None else first.unit if first is not None else ""
    where = f"; first in {_shown(unit)}" + (f" ({zero_log.operator} of 0)" if zero_log is not None else "")
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


def _scale(seen: Observations) -> Iterator[Finding]:
    half = seen.num_steps // 2
    late = sum(step > half for step in seen.skipped)
    if late < MIN_SKIPPED or late <= MAX_SKIPPED_SHARE * (seen.num_steps - half):
        return
    backward = next((birth for birth in seen.births if birth.backward), None)
    unit = backward.unit if backward is not None else ""
    place = f"; gradients stop being finite in {_shown(unit)} ({backward.operator})" if backward is not None else ""
    yield Finding(
        "falling scale",
        unit,
        f"{len(seen.skipped)} of {seen.num_steps} steps skipped, scale {seen.scales[0]:g} to {seen.scales[-1]:g}"
        + place,
        "a skipped step learns nothing; a scale that reaches 0 writes NaN into the weights",
        "mend an overflow of the forward pass where there is one; else a lower init_scale, or that module in FP32",
    )


def _underflow(seen: Observations) -> Iterator[Finding]:
    lost = {unit: f for unit, f in seen.flushed.items() if f.magnitude_share >= MAX_FLUSHED_SHARE}
    if not lost or torch.float16 not in seen.used_half:
        return
    unit, worst = max(lost.items(), key=lambda item: item[1].magnitude_share)
    others = [name for name in lost if name != unit]
    scaled = f"at a loss scale of {seen.scales[-1]:g}" if seen.scales else "without a grad scaler"
    yield Finding(
        "underflow",
        unit,
        f"{worst.share:.0%} of the gradient values of {_shown(unit)} ({worst.magnitude_share:.0%} of their magnitude) "
        f"round to 0 in FP16, {scaled}" + (f"; also in {_names(others)}" if others else ""),
        "what rounds to 0 is not learned from: the accuracy falls and nothing fails",
        "scale the loss: torch.amp.GradScaler with its init_scale of 65536"
        if not seen.scales
        else "a larger init_scale, or that module in FP32 or BF16",
    )


def _half_loss(seen: Observations) -> Iterator[Finding]:
    for unit, operator in list(seen.half_losses.items())[:1]:
        yield Finding(
            "loss in half",
            unit,
            f"{operator} computed in half, in {_shown(unit)}",
            "FP16 has 3 decimal digits and ends at 65504: the loss is rounded, its sums overflow",
            "give the loss FP32: loss(output.float(), ...), or compute it under autocast, which does that",
        )
    dtypes = seen.loss_dtypes & {torch.float16, torch.bfloat16}
    if dtypes and not seen.half_losses:
        yield Finding(
            "loss in half",
            "",
            f"the loss that backward starts from is {_dtype(next(iter(dtypes)))}",
            "it is rounded to 3 decimal digits, and scaling it overflows above 65504",
            "give the loss FP32: loss(output.float(), ...)",
        )


def _half_softmax(seen: Observations) -> Iterator[Finding]:
    if seen.half_softmax:
        unit, dtype = next(iter(seen.half_softmax.items()))
        yield Finding(
            "softmax in half",
            unit,
            f"softmax computed in {_dtype(dtype)} in {_names(list(seen.half_softmax))}",
            "small probabilities round to 0 and their logarithm is -inf; a policy that was proved may do it on purpose",
            "autocast computes it in FP32; in a policy give that module 'autocast'",
            is_wrong=False,
        )


def _batchnorm(seen: Observations) -> Iterator[Finding]:
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
            f"running statistics of {_names(list(seen.half_statistics))} are {_dtype(dtype)}",
            "an average that moves by a tenth stands still in half, and a variance overflows above 65504",
            f"keep normalization layers in FP32: module.float() for {name}",
        )


def _parameters(seen: Observations) -> Iterator[Finding]:
    if seen.half_parameters:
        names = list(seen.half_parameters)
        dtype = _dtype(next(iter(seen.half_parameters.values())))
        yield Finding(
            "half parameters",
            names[0].rpartition(".")[0],
            f"{len(names)} trainable parameters are {dtype}: {_names(names)}",
            "updates smaller than the last place of half are lost, and GradScaler refuses FP16 gradients",
            "keep the model in FP32 (no model.half()) and take autocast or autoprec.apply_policy",
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


def _misuse(seen: Observations) -> Iterator[Finding]:
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


def _no_half(seen: Observations) -> Iterator[Finding]:
    if not seen.used_half and not seen.half_parameters:
        yield Finding(
            "nothing in half",
            "",
            "no operator computed in FP16 or BF16",
            "neither memory nor time is saved; autocast for a device that is not there does nothing",
            "torch.autocast for the device that the tensors are on, or autoprec.apply_policy",
            is_wrong=False,
        )


def _costs(seen: Observations) -> Iterator[Finding]:
    fp32, half = (sum(counts[kind] for counts in seen.saved_bytes.values()) for kind in ("fp32", "half"))
    total = fp32 + half
    if seen.used_half and total >= MIN_SAVED_BYTES and fp32 > MAX_FP32_SHARE * total:
        by_bytes = sorted(seen.saved_bytes, key=lambda unit: -seen.saved_bytes[unit]["fp32"])
        sizes = [f"{_shown(u)} {seen.saved_bytes[u]['fp32'] / 2**20:.1f} MiB" for u in by_bytes[:NUM_NAMES]]
        yield Finding(
            "memory not saved",
            by_bytes[0],
            f"{fp32 / total:.0%} of what is kept for the backward pass is FP32: {', '.join(sizes)}",
            "autocast computes norms, softmax and losses in FP32 and keeps what they take",
            "true half for these modules (a policy's 'fp16'), found and proved by autoprec search",
            is_wrong=False,
        )
    flops = sum(products.flops for products in seen.products.values())
    padded = sum(products.padded_flops for products in seen.products.values())
    if flops and padded > (1 + MAX_PADDED_SHARE) * flops:
        unit, worst = max(seen.products.items(), key=lambda item: item[1].padded_flops - item[1].flops)
        yield Finding(
            "sizes that are no multiples of 8",
            unit,
            f"tensor cores do {padded / flops:.1f} times the work, most of it in {_shown(unit)} (sizes "
            f"{', '.join(map(str, worst.sizes))})",
            "they pad each size of a half product to a multiple of 8",
            "widths, vocabularies and batches that are multiples of 8",
            is_wrong=False,
        )
    if seen.step_seconds and seen.cast_seconds > MAX_CAST_SHARE * seen.step_seconds:
        yield Finding(
            "casts",
            "",
            f"{seen.num_casts / max(1, seen.num_steps):.0f} casts a step are "
            f"{seen.cast_seconds / seen.step_seconds:.0%} of its predicted time",
            "casting costs more than half saves",
            "give neighbours one precision, cast inputs once, or train in FP32",
            is_wrong=False,
        )


RULES: tuple[Callable[[Observations], Iterator[Finding]], ...] = (
    _parameters,
    _misuse,
    _overflow,
    _non_finite_loss,
    _batchnorm,
    _scale,
    _underflow,
    _half_loss,
    _half_softmax,
    _no_half,
    _costs,
)


def _shown(unit: str) -> str:
    return unit or "the model's own code or the loss"


def _names(names: list[str]) -> str:
    more = f" and {len(names) - NUM_NAMES} more" if len(names) > NUM_NAMES else ""
    return ", ".join(_shown(name) for name in names[:NUM_NAMES]) + more


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
