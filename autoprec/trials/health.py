"""Whether a process may run another trial: its device still answers, and the memory of the last one came back."""

from __future__ import annotations

import os

import torch

from autoprec.trials.failures import describe
from autoprec.trials.isolation import models_left, modes_left

__all__ = ["Health"]

LEFT_ON_DEVICE_BYTES = 64 * 2**20
"""What libraries keep on a device after a first trial (workspaces) is the base; so much more counts as a leak."""
LEFT_IN_PROCESS_BYTES = 2**30
"""Likewise for a process's resident memory, which allocators give back late and in part: so much more, or double."""

MAX_TOLD = 3


class Health:
    """Looks after each trial at what it left behind; the first look sets the base of memory."""

    def __init__(self) -> None:
        modes_left()  # of what ran here before
        self._on_device: int | None = None
        self._in_process: int | None = None

    def look(self, device: str) -> str:
        """Return in a few words why this process must not run another trial; "" where it may."""
        if models_left():
            return "the task kept the model of a trial alive"
        if modes := modes_left():
            more = f" and {len(modes) - MAX_TOLD} more" if len(modes) > MAX_TOLD else ""
            return f"the task left behind {', '.join(modes[:MAX_TOLD])}{more}"
        kind = torch.device(device)
        if kind.type == "cuda" and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            try:
                torch.cuda.synchronize(kind)
                allocated = torch.cuda.memory_allocated(kind)
            except Exception as error:  # a sticky error: every later call of this process raises it again
                return f"the device does not answer any more ({describe(error)})"
            base, self._on_device = self._on_device, min(allocated, self._on_device or allocated)
            if base is not None and allocated > base + LEFT_ON_DEVICE_BYTES:
                return f"{(allocated - base) / 2**20:,.0f} MiB of the device's memory did not come back"
        resident = resident_bytes()
        if self._in_process is None:
            self._in_process = resident
        elif resident > self._in_process + max(LEFT_IN_PROCESS_BYTES, self._in_process):
            return f"{(resident - self._in_process) / 2**20:,.0f} MiB of memory did not come back"
        return ""


def resident_bytes() -> int:
    """Return the resident memory of this process; 0 where the system does not say."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
