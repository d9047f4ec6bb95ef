"""The guard writes to TensorBoard's own SummaryWriter: what its reader finds is what the guard noted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

pytest.importorskip("tensorboard", reason="tensorboard is not installed")

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

from autoprec.guard import TrainingGuard

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def test_tensorboard_reads_what_the_guard_noted(tmp_path: Path) -> None:
    model = nn.Linear(2, 1, bias=False)
    nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    with (
        SummaryWriter(str(tmp_path)) as writer,
        TrainingGuard(model, optimizer=optimizer, grad_scaler=scaler, log=writer) as guard,
    ):
        for factor in (1.0, float("inf"), 2.0):
            optimizer.zero_grad()
            loss = model(torch.tensor([[3.0, 4.0]])).sum()
            scaler.scale(loss * factor).backward()
            scaler.step(optimizer)
            scaler.update()
            guard.after_step(loss)
    read = EventAccumulator(str(tmp_path)).Reload()
    values = {tag: [(e.step, e.value) for e in read.Scalars(tag)] for tag in read.Tags()["scalars"]}
    assert values["guard/loss_scale"] == [(1, 8.0), (2, 8.0), (3, 4.0)]
    assert values["guard/skipped"] == [(1, 0.0), (2, 1.0), (3, 0.0)]
    assert values["guard/grad_norm"] == [(1, 5.0), (3, 10.0)]
    assert values["guard/loss"] == [(1, 7.0), (2, 7.0), (3, 7.0)]
