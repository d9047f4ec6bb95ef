"""Two processes that train by DDP in a framework end as a plain loop that accumulates over both their batches."""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from digits_training import POLICY, train_plainly
from two_processes import NUM_STEPS

SCRIPT = Path(__file__).parent / "two_processes.py"


def free_port() -> str:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return str(found.getsockname()[1])


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["lightning", "accelerate"])
def test_two_processes_end_with_the_weights_of_a_plain_loop(framework: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"the extra `{framework}` is not installed")
    command = [sys.executable, str(SCRIPT), framework, str(tmp_path)]
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "OMP_NUM_THREADS": "1"}
    # Lightning starts the second process itself
    ranks = [{}] if framework == "lightning" else [{"RANK": str(r), "LOCAL_RANK": str(r)} for r in range(2)]
    size = {} if framework == "lightning" else {"WORLD_SIZE": "2"}
    running = [
        subprocess.Popen(command, env={**os.environ, **group, **size, **rank}, stderr=subprocess.PIPE, text=True)
        for rank in ranks
    ]
    for process in running:
        _, errors = process.communicate(timeout=600)
        assert process.returncode == 0, errors[-2000:]
    plain, _ = train_plainly(POLICY, num_steps=NUM_STEPS, accumulation_steps=2)
    found = [torch.load(tmp_path / f"rank{rank}.pt", weights_only=True) for rank in range(2)]
    for name, parameter in plain.named_parameters():
        assert torch.equal(found[0]["weights"][name], found[1]["weights"][name]), name
        torch.testing.assert_close(found[0]["weights"][name], parameter.detach(), atol=1e-3, rtol=0.0)
    assert found[0]["scale"] == found[1]["scale"] == 2.0**15  # doubled once, at the 20th good step
