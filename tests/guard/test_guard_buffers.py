"""The buffers of the last good step: only what was written is copied, only what was finite comes back."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from autoprec.guard.buffers import BufferKeeper


class Buffered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("table", torch.ones(3))
        self.register_buffer("mask", torch.full((2,), -math.inf))
        self.register_buffer("count", torch.tensor(0))


def test_what_was_written_since_is_taken_over_and_a_mask_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[int] = []
    copy = torch._foreach_copy_
    monkeypatch.setattr(torch, "_foreach_copy_", lambda to, of: (copied.append(len(to)), copy(to, of)))
    model = Buffered()
    keeper = BufferKeeper(model)
    keeper.keep()
    model.mean.add_(1)
    keeper.keep()
    keeper.keep()
    model.mean = torch.full((2,), 2.0)
    keeper.keep()
    assert copied == [2, 1, 1]
    model.mean.fill_(math.nan)
    model.mask.fill_(math.nan)
    assert keeper.non_finite() == ["mean"]
    assert keeper.put_back(["mean"]) == ["mean"]
    assert model.mean.tolist() == [2.0, 2.0]


def test_a_copy_that_is_not_finite_itself_is_not_put_back() -> None:
    model = Buffered()
    keeper = BufferKeeper(model)
    model.table[0] = math.inf
    keeper.keep()
    assert keeper.non_finite() == ["table"]
    assert keeper.put_back(["table"]) == []
