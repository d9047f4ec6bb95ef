"""The guard in a process group: what one process sees, all do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from guarded import Net, make, train
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from autoprec import emulate, load_policy


def _train_with_an_overflow_on_one(rank: int, folder: str) -> dict[str, Any]:
    """Only process 1 adds a number to what `body` takes that brings it out of FP16's range."""

    class Shifted(Net):
        shift = 0.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.norm(self.body(torch.relu(self.stem(x)) + self.shift)))

    model = Shifted()

    def plant(step: int, model: nn.Module) -> None:
        model.shift = 6e4 if step >= 3 and rank == 1 else 0.0
        if step == 1:
            with torch.no_grad():
                model.body.weight.fill_(0.1)

    model = make(model=model)
    replica = DistributedDataParallel(model)
    with emulate():
        guard, records = train(
            model, 10, at_step=plant, call=replica, log=f"{folder}/guard.csv", patched_policy=f"{folder}/p.json"
        )
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    return {
        "events": [(e.step, e.kind, e.unit) for e in guard.events if e.kind != "buffers"],
        "skipped": [r.step for r in records if r.skipped],
        "weights": weights.tolist(),
    }


def test_all_processes_move_the_unit_that_overflowed_in_one_of_them(run_in_two: Any, tmp_path: Path) -> None:
    first, second = run_in_two(_train_with_an_overflow_on_one, str(tmp_path))
    assert first == second
    assert first["events"] == [(4 + late, kind, "body") for late, kind in zip((0, 1), ("named", "moved"), strict=True)]
    assert first["skipped"] == [3, 4, 5]
    assert load_policy(tmp_path / "p.json").modules["body"] == "fp32"
    assert sorted(path.name for path in tmp_path.glob("*.*")) == ["guard.csv", "p.json"]
