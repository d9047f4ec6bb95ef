"""A model's floating buffers as they were after the last good step: running statistics survive a bad forward."""

from __future__ import annotations

import torch
from torch import nn

from autoprec.apply.structure import unwrap

__all__ = ["BufferKeeper"]


class BufferKeeper:
    """Keeps a copy of each floating buffer that is finite at the start; a mask of -inf is left alone."""

    def __init__(self, model: nn.Module) -> None:
        self._model = unwrap(model)
        self._seen: dict[str, tuple[int, int]] = {}
        self._kept = {name: buffer.detach().clone() for name, buffer in self._floating().items() if _all_finite(buffer)}

    def keep(self) -> None:
        """Take over the buffers that were written to; nothing is looked at, so nothing waits for the device."""
        now = self._floating()
        changed = [
            (old, now[name])
            for name, old in self._kept.items()
            if name in now and now[name].shape == old.shape and self._seen.get(name) != _version(now[name])
        ]
        self._seen = {name: _version(buffer) for name, buffer in now.items()}
        if changed:
            with torch.no_grad():
                torch._foreach_copy_([old for old, _ in changed], [new for _, new in changed])

    def non_finite(self) -> list[str]:
        """Return the names of the buffers that were finite at the start and are not now."""
        return [name for name, buffer in self._floating().items() if name in self._kept and not _all_finite(buffer)]

    def put_back(self, names: list[str]) -> list[str]:
        """Write the kept values into these buffers, where those are finite; return the names of the ones written."""
        now = self._floating()
        written = [name for name in names if _all_finite(self._kept[name])]
        with torch.no_grad():
            for name in written:
                now[name].copy_(self._kept[name])
        return written

    def _floating(self) -> dict[str, torch.Tensor]:
        return {name: buffer for name, buffer in self._model.named_buffers() if buffer.is_floating_point()}


def _version(tensor: torch.Tensor) -> tuple[int, int]:
    """Return what changes when a buffer is written to in place or replaced."""
    return id(tensor), tensor._version


def _all_finite(tensor: torch.Tensor) -> bool:
    return bool(torch.isfinite(tensor).all())
