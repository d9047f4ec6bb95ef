"""Peak tensor bytes of a recorded step, by category and by unit."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from autoprec.estimates.recording import StepRecording
from autoprec.estimates.tracker import CATEGORIES, Category, PhaseMark, StorageRecord

__all__ = ["ALLOCATION_BYTES", "MemoryBreakdown", "peak_memory"]

ALLOCATION_BYTES = 512
"""CUDA's caching allocator rounds blocks up to a multiple of this (kMinBlockSize, c10/core/AllocatorConfig.h)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBreakdown:
    """The bytes that are alive at the peak of one step.

    Attributes:
        peak_bytes: the sum of either of the next two.
        by_category: category -> bytes at the peak; every category is there.
        by_unit: module name -> bytes at the peak; "" is the root: the inputs and what no other module made.
        peak_phase: where the peak lies: "forward", "backward" or "optimizer".
        saved_by_unit: module name -> bytes that its forward keeps for the backward pass.
    """

    peak_bytes: int
    by_category: Mapping[Category, int]
    by_unit: Mapping[str, int]
    peak_phase: str
    saved_by_unit: Mapping[str, int]


def peak_memory(recording: StepRecording, *, rounding_bytes: int = ALLOCATION_BYTES) -> MemoryBreakdown:
    """Find the peak of a recorded step; each storage is rounded up to `rounding_bytes` (1 counts raw bytes)."""

    def size(record: StorageRecord) -> int:
        return -(-record.num_bytes // rounding_bytes) * rounding_bytes

    phases = _Phases(recording.phases)
    peak_clock = _peak_clock(recording, size)
    by_category: Counter[Category] = Counter(dict.fromkeys(CATEGORIES, 0))
    by_unit: Counter[str] = Counter()
    saved: Counter[str] = Counter()
    forward_end = phases.last_forward_end
    for record in recording.records:
        category = phases.category_of(record)
        if record.born <= peak_clock < record.died:
            by_category[category] += size(record)
            by_unit[record.unit] += size(record)
        kept = record.phase == "forward" and record.born <= forward_end < record.died
        if kept and category in ("activations", "weight_casts"):
            saved[record.unit] += size(record)
    return MemoryBreakdown(
        peak_bytes=sum(by_unit.values()),
        by_category=MappingProxyType(dict(by_category)),
        by_unit=MappingProxyType(dict(by_unit)),
        peak_phase=phases.at(peak_clock),
        saved_by_unit=MappingProxyType(dict(saved)),
    )


def _peak_clock(recording: StepRecording, size: Callable[[StorageRecord], int]) -> int:
    """Return the first moment of the step at which most bytes are alive."""
    changes: dict[int, int] = {}
    total = 0
    for record in recording.records:
        if record.died <= recording.start:
            continue
        if record.born <= recording.start:
            total += size(record)
        else:
            changes[record.born] = size(record)
        changes[record.died] = -size(record)
    peak, peak_clock = total, recording.start
    for clock in sorted(changes):
        total += changes[clock]
        if total > peak:
            peak, peak_clock = total, clock
    return peak_clock


class _Phases:
    """Which phase a moment lies in, and what that makes of a storage."""

    def __init__(self, marks: tuple[PhaseMark, ...]) -> None:
        self._marks = marks
        self._clocks = [clock for clock, _ in marks]

    def at(self, clock: int) -> str:
        index = bisect_right(self._clocks, clock) - 1
        return self._marks[index][1] if index >= 0 else "before"

    def _end(self, clock: int) -> int:
        index = bisect_right(self._clocks, clock)
        return self._clocks[index] if index < len(self._clocks) else self._clocks[-1]

    @property
    def last_forward_end(self) -> int:
        starts = [clock for clock, phase in self._marks if phase == "forward"]
        return self._end(starts[-1]) if starts else 0

    def category_of(self, record: StorageRecord) -> Category:
        """A storage without a label that outlives its forward pass is an activation, any other is temporary."""
        if record.category is not None:
            return record.category
        outlives = record.phase == "forward" and record.died > self._end(record.born)
        return "activations" if outlives else "temporaries"
