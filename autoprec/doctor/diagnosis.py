"""From what was seen to findings: what is wrong, in which layer, why it matters and what to change. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from autoprec.doctor import cost_rules, loop_rules, value_rules
from autoprec.doctor.finding import Finding, place_of
from autoprec.doctor.observations import Observations

__all__ = ["diagnose", "summarise"]

RULES: tuple[Callable[[Observations], Iterator[Finding]], ...] = (
    loop_rules.parameters,
    loop_rules.misuse,
    value_rules.overflow,
    value_rules.non_finite_loss,
    value_rules.batchnorm,
    value_rules.scale,
    value_rules.underflow,
    value_rules.rounded,
    value_rules.half_loss,
    value_rules.half_softmax,
    cost_rules.no_half,
    cost_rules.costs,
)


def diagnose(seen: Observations) -> list[Finding]:
    """Return all findings, what endangers the training first; empty where nothing is wrong."""
    found = [finding for rule in RULES for finding in rule(seen)]
    if seen.error and not any(finding.is_wrong for finding in found):
        what = f"the training raised {seen.error}"
        found.append(Finding("error", "", what, "it ended before its steps were done", "mend that"))
    return sorted(found, key=lambda finding: not finding.is_wrong)


def summarise(seen: Observations) -> dict[str, str]:
    """Return the plain facts of the run, in the order in which they are read."""
    facts = {"steps": f"{seen.num_steps} tried, {len(seen.skipped)} skipped by the grad scaler"}
    if seen.error:
        facts["ended with"] = seen.error
    if seen.losses:
        facts["loss"] = f"{seen.losses[0]:.4g} to {seen.losses[-1]:.4g}"
    if seen.scales:
        facts["loss scale"] = f"{seen.scales[0]:g} to {seen.scales[-1]:g}, lowest {min(seen.scales):g}"
    if seen.grad_norms:
        facts["gradient norm"] = f"{min(seen.grad_norms):.3g} to {max(seen.grad_norms):.3g} as the optimizer sees it"
    if seen.largest_half:
        unit, value = max(seen.largest_half.items(), key=lambda item: item[1])
        facts["largest FP16 value"] = f"{value:.4g} of 65504, in {place_of(unit)}"
    worst = max(seen.flushed.items(), key=lambda item: item[1].share, default=None)
    if worst is not None and worst[1].num_flushed:
        lost = f"{worst[1].share:.1%} of values ({worst[1].magnitude_share:.2%} of magnitude)"
        facts["gradients that half rounds to 0"] = f"at most {lost}, in {place_of(worst[0])}"
    fp32, half = (sum(counts[kind] for counts in seen.saved_bytes.values()) for kind in ("fp32", "half"))
    if fp32 + half:
        facts["kept for backward"] = f"{half / 2**20:.2f} MiB in half, {fp32 / 2**20:.2f} MiB in FP32"
    if seen.num_casts and seen.num_steps:
        share = seen.cast_seconds / seen.step_seconds
        facts["casts"] = f"{seen.num_casts / seen.num_steps:.0f} a step, {share:.0%} of its predicted time"
    return facts
