"""Faults that poison a process: the trial is recorded as its kind, and the next one equals a clean one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from autoprec import Policy
from autoprec.tasks import TaskSource
from autoprec.trials import Outcome, TrialSettings, Worker
from gpu_parts import Context

__all__ = ["inject_faults"]

CLEAN, FAILING = Policy(default="autocast", dtype="fp16"), Policy(default="autocast", dtype="bf16")
EXPECTED = {"out of memory": "out_of_memory", "device-side assert": "crashed"}
TASK = Path(__file__).with_name("faulty_task.py")


def inject_faults(context: Context) -> list[dict[str, Any]]:
    device = str(context.device) if context.is_cuda else "cpu"
    settings = TrialSettings(device=device, warmup_steps=2, measured_steps=6)
    results = []
    print(f"\n{'fault':<20}{'recorded as':<20}{'next trial equals a clean one':>30}   ({context.kind})")
    for fault, expected in EXPECTED.items():
        source = TaskSource("function", {"name": f"{TASK}:task", "arguments": {"fault": fault}})
        with Worker(source, num_threads=torch.get_num_threads()) as worker:
            before = worker.run(CLEAN, settings)
            failed = worker.run(FAILING, settings)
            after = worker.run(CLEAN, settings)
        equal = before.is_ok and _numbers(before) == _numbers(after)
        row = {"fault": fault, "kind": failed.kind, "as_expected": failed.kind == expected, "next_is_equal": equal}
        results.append(row | {"message": failed.message[:200]})
        print(f"{fault:<20}{failed.kind:<20}{'yes' if equal else 'NO':>30}", flush=True)
        context.results["faults"] = results
    return results


def _numbers(outcome: Outcome) -> dict[str, Any]:
    """Return what must be equal: losses, scales, accuracy and memory, not times."""
    numbers = outcome.model_dump(include={"kind", "train_losses", "scale_history", "accuracy", "eval_loss"})
    return numbers | {"peak_memory_bytes": outcome.peak_memory_bytes}
