"""The front of a search as a table: every policy with its numbers, their kinds and intervals, and the picks."""

from __future__ import annotations

from rich.table import Table

from autoprec.policy import Number
from autoprec.report.escaping import escaped
from autoprec.report.quantities import show_accuracy, show_bytes, show_ratio_number, show_throughput
from autoprec.search.front import Front, Member

__all__ = ["front_table"]

TOKENS = "throughput_tokens_per_second"


def front_table(front: Front, *, chosen: str | None = None) -> Table:
    """Return one row a policy; `chosen` marks another one than the front recommends."""
    table = Table(title=escaped(f"{front.task} on {front.target}"), title_justify="left")
    table.add_column("")
    counts_tokens = any(TOKENS in member.numbers for member in front.front)
    budget = front.memory_budget_bytes
    tokens = ["tokens"] if counts_tokens else []
    largest = [] if budget is None else [f"largest batch in {show_bytes(Number(value=budget, kind='computed'))}"]
    for name in ("peak memory", "throughput", *tokens, f"{front.metric.name} (proof)", "proof", *largest, "picks"):
        table.add_column(escaped(name), justify="right")
    for member in front.front:
        picks = [prefer for prefer, name in front.picks.items() if name == member.name]
        if member.name == (chosen or front.recommended):
            picks.insert(0, "chosen" if chosen else "recommended")
        table.add_row(
            escaped(member.name),
            _cell(show_bytes(member.numbers.get("peak_memory_bytes")), member, "peak_memory_bytes"),
            _cell(
                show_throughput(member.numbers.get("throughput_samples_per_second")),
                member,
                "throughput_samples_per_second",
            ),
            *([_tokens(member)] if counts_tokens else []),
            _accuracy(member),
            _proof(member),
            *([] if budget is None else [_largest(member)]),
            ", ".join(picks),
        )
    return table


def _cell(shown: str, member: Member, name: str) -> str:
    number = member.numbers.get(name)
    return "\n".join(part for part in (shown, show_ratio_number(member.ratios.get(name)), _kind(number)) if part)


def _tokens(member: Member) -> str:
    number = member.numbers.get(TOKENS)
    return "\n".join(part for part in (show_throughput(number), _kind(number)) if part)


def _accuracy(member: Member) -> str:
    number = member.numbers.get("accuracy")
    if number is None:
        return "-"
    interval = "" if number.low is None or number.high is None else f"[{number.low:.4f}, {number.high:.4f}]"
    return "\n".join(part for part in (show_accuracy(number), escaped(interval), _kind(number)) if part)


def _proof(member: Member) -> str:
    if member.outcome != "ok":
        return escaped(member.outcome)
    return "not verified" if member.proof is None else member.proof.verdict


def _largest(member: Member) -> str:
    found = member.largest_batch
    if found is None:
        return "-"
    if found.batch_size == 0:
        return "not one sample"
    memory, throughput = found.peak_memory_bytes, found.throughput_samples_per_second
    shown = (f"{show_bytes(memory)} {_kind(memory)}", f"{show_throughput(throughput)} {_kind(throughput)}")
    return "\n".join([f"{found.batch_size:,}", *shown])


def _kind(number: Number | None) -> str:
    return "" if number is None else number.kind
