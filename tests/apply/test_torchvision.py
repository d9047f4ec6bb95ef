"""One small model of each torchvision family under a random policy; benchmarks/named_models.py tries them all."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import named_models

QUICK = ("squeezenet1_1", "resnet18", "shufflenet_v2_x0_5", "mnasnet0_5", "mobilenet_v3_small")
SLOW = (
    "alexnet", "vgg11_bn", "densenet121", "efficientnet_b0", "regnet_x_400mf", "mobilenet_v2", "googlenet",
    "inception_v3", "vit_b_16", "swin_t", "swin_v2_t", "convnext_tiny", "maxvit_t", "resnext50_32x4d",
)  # fmt: skip


@pytest.mark.filterwarnings("ignore:The default weight initialization:FutureWarning")
@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_a_random_policy_trains_evaluates_and_leaves_no_trace(name: str) -> None:
    result = named_models.try_model(name)
    assert result.problem == ""
    if not name.startswith("swin_v2"):  # its F.normalize divides by 0 in half
        assert result.loss == pytest.approx(result.bare_loss, abs=1.0)
