"""DeepSpeed's own parser takes every exported configuration, and a step runs where DeepSpeed does."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from autoprec import Policy
from autoprec.integrations.deepspeed_config import KEEPS_POLICY, ZERO_STAGES, deepspeed_config
from autoprec.policy import GradScalerSettings, TrainingOptions

deepspeed_is_there = pytest.mark.skipif(
    __import__("importlib.util").util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed"
)
MIXED = Policy(default="bf16", dtype="bf16", modules={"norm": "fp32"})
POLICIES = {
    "fp32": Policy(default="fp32"),
    "autocast fp16": Policy(default="autocast", grad_scaler=GradScalerSettings(init_scale=256.0)),
    "autocast bf16": Policy(default="autocast", dtype="bf16"),
    "fp16": Policy(default="fp16", grad_scaler=GradScalerSettings(init_scale=3.0, growth_interval=7)),
    "bf16": MIXED.replace(training=TrainingOptions(accumulation_steps=4)),
}


def run(script: str, *arguments: str) -> Any:
    """Run a script in a process of its own: DeepSpeed sets environment, logging and process groups for good."""
    environment = {
        **os.environ,
        "DS_BUILD_OPS": "0",
        "DS_ACCELERATOR": "cpu",
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    place = Path(__file__).with_name("deepspeed_checks.py")
    answer = subprocess.run(
        [sys.executable, str(place), script, *arguments], env=environment, capture_output=True, text=True, timeout=240
    )
    assert answer.returncode == 0, answer.stderr[-3000:]
    return json.loads(answer.stdout.splitlines()[-1])


@deepspeed_is_there
def test_deepspeeds_parser_accepts_every_exported_configuration_and_reads_what_was_meant() -> None:
    pairs = list(itertools.product(POLICIES, ZERO_STAGES))
    texts = [deepspeed_config(POLICIES[name], zero_stage=stage, micro_batch_size=8).text for name, stage in pairs]
    read = run("parse", json.dumps(texts))
    for (name, stage), found in zip(pairs, read, strict=True):
        assert found["stage"] == stage
        assert found["micro_batch"] == 8
        assert found["clipping"] == 0.0
        assert found["accumulation"] == (4 if name == "bf16" else 1)
        assert found["fp16"] == (name == "fp16")
        assert found["bf16"] == (name == "bf16")
        assert found["autocast"] == {"autocast fp16": "torch.float16", "autocast bf16": "torch.bfloat16"}.get(name)
        if name == "fp16":
            assert (found["init_scale"], found["scale_window"]) == (2, 7)


@deepspeed_is_there
@pytest.mark.parametrize("name", ["fp32", "autocast bf16", "bf16"])
def test_a_training_runs_with_the_exported_configuration(name: str) -> None:
    text = deepspeed_config(POLICIES[name].replace(training=None), zero_stage=1, micro_batch_size=16).text
    answer = run("train", text)
    assert len(answer["losses"]) == 100
    assert sum(answer["losses"][-10:]) < 0.5 * sum(answer["losses"][:10])
    assert answer["parameters"] == (["torch.bfloat16"] if name == "bf16" else ["torch.float32"])


@deepspeed_is_there
def test_a_policy_without_fp16_is_kept_whole_as_the_note_says() -> None:
    exported = deepspeed_config(MIXED)
    assert KEEPS_POLICY in exported.notes
    text = deepspeed_config(Policy(default="fp32"), zero_stage=2, micro_batch_size=16).text
    answer = run("train", text, MIXED.to_json())
    plain = run("plain", MIXED.to_json())
    assert answer["losses"] == pytest.approx(plain["losses"], abs=1e-3)
    assert answer["computed"] == plain["computed"] == {"norm": ["torch.float32"], "head": ["torch.bfloat16"]}
