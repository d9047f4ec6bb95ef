"""The training example runs as a user would run it, and trains as well under FP16 as in FP32."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from autoprec.policy import ModelInfo, ModuleInfo, Policy

SCRIPT = Path(__file__).parents[2] / "examples" / "train_with_policy.py"


def _train(*arguments: str) -> tuple[float, str]:
    """Run the example; return its held-out accuracy and everything it printed."""
    command = [sys.executable, str(SCRIPT), "--device", "cpu", *arguments]
    environment = {**os.environ, "PYTHONWARNINGS": "always::UserWarning"}
    result = subprocess.run(command, capture_output=True, text=True, timeout=900, env=environment)
    assert result.returncode == 0, result.stderr
    found = re.search(r"held-out accuracy ([\d.]+)", result.stdout)
    assert found is not None
    return float(found[1]), result.stdout + result.stderr


def test_the_example_trains_under_a_policy_file(tmp_path: Path) -> None:
    path = tmp_path / "policy.json"
    Policy(default="fp16", modules={"fc": "fp32"}).save(path)
    accuracy, output = _train("--policy", str(path), "--steps", "2")
    assert 0 <= accuracy <= 1
    assert re.search(r"step    1  loss \d\.\d+  scale \d+", output)
    assert "Warning" not in output


def test_a_policy_of_another_number_of_classes_applies_with_a_warning(tmp_path: Path) -> None:
    path = tmp_path / "policy.json"
    head = ModuleInfo(type="Linear", parameters={"weight": [10, 512], "bias": [10]})
    model = ModelInfo(name="resnet18", fingerprint="0", modules={"fc": head})
    Policy(modules={"fc": "fp32"}, model=model).save(path)
    script = (
        "import torchvision, autoprec\n"
        "model = torchvision.models.resnet18(num_classes=1000)\n"
        f"policy = autoprec.load_policy({str(path)!r})\n"
        "autoprec.apply_policy(model, policy, strict=False)\n"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "fc {'weight': [1000, 512], 'bias': [1000]} instead of {'weight': [10, 512], 'bias': [10]}" in result.stderr


@pytest.mark.slow
def test_fp16_emulated_reaches_95_percent_and_stays_within_a_point_of_fp32(tmp_path: Path) -> None:
    path = tmp_path / "policy.json"
    Policy(default="fp16", modules={"fc": "fp32"}).save(path)
    half, _ = _train("--policy", str(path))
    full, _ = _train("--fp32")
    assert half >= 0.95
    assert half >= full - 0.01
