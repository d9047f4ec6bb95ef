"""What costs memory or time and endangers nothing: FP32 that is kept, padded sizes, casts, no half at all."""

from __future__ import annotations

from collections.abc import Iterator

from autoprec.doctor.finding import NUM_NAMES, Finding, place_of
from autoprec.doctor.observations import Observations

__all__ = ["costs", "no_half"]

MAX_FP32_SHARE = 0.6
MIN_SAVED_BYTES = 2**20
"""Below a MiB of activations memory is no reason for half."""
MAX_PADDED_SHARE = 0.2
MAX_CAST_SHARE = 0.5


def no_half(seen: Observations) -> Iterator[Finding]:
    """Find a training that computes nothing in half."""
    if not seen.used_half and not seen.half_parameters:
        yield Finding(
            "nothing in half",
            "",
            "no operator computed in FP16 or BF16",
            "neither memory nor time is saved; autocast for a device that is not there does nothing",
            "torch.autocast for the device that the tensors are on, or autoprec.apply_policy",
            is_wrong=False,
        )


def costs(seen: Observations) -> Iterator[Finding]:
    """Find FP32 that is kept, sizes that are padded, and too many casts."""
    fp32, half = (sum(counts[kind] for counts in seen.saved_bytes.values()) for kind in ("fp32", "half"))
    total = fp32 + half
    if seen.used_half and total >= MIN_SAVED_BYTES and fp32 > MAX_FP32_SHARE * total:
        by_bytes = sorted(seen.saved_bytes, key=lambda unit: -seen.saved_bytes[unit]["fp32"])
        sizes = [f"{place_of(u)} {seen.saved_bytes[u]['fp32'] / 2**20:.1f} MiB" for u in by_bytes[:NUM_NAMES]]
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
            f"tensor cores do {padded / flops:.1f} times the work, most of it in {place_of(unit)} (sizes "
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
