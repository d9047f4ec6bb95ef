"""The shapes of torchvision's and timm's training scripts train under a policy as autoprec's own loop does."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
from torch import nn

import autoprec
from autoprec import Policy
from autoprec.probes.dtypes import watch_dtypes
from autoprec.tasks.images import image_batches

FOLDER = Path(__file__).parents[2] / "examples" / "reference_scripts"
SIZE = 16
NUM_EPOCHS = 2
BATCH_SIZE = 28
FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
SCALER: dict[str, Any] = {"init_scale": 2.0**6, "growth_interval": 40}
OPTIMIZER: dict[str, Any] = {"eps": 1e-6, "amsgrad": True}
TORCHVISION = Policy(
    modules={"conv1": "fp32", "stage2": "fp16", "stage3": "autocast", "stage4": "bf16", "fc": "fp32"},
    grad_scaler=SCALER,
    optimizer=OPTIMIZER,
)
TIMM = Policy(
    default="fp16",
    modules={"patch_embed": "fp32", "blocks.1": "autocast", "blocks.2": "bf16", "head": "fp32"},
    grad_scaler=SCALER,
    optimizer=OPTIMIZER,
)


def load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"reference_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def arguments(policy: Policy, folder: Path, **others: Any) -> list[str]:
    policy.save(folder / "policy.json")
    settings: dict[str, Any] = {
        "policy": folder / "policy.json",
        "image_size": SIZE,
        "batch_size": BATCH_SIZE,
        "device": "cpu",
    }
    settings |= {"epochs": NUM_EPOCHS, "lr_epochs": NUM_EPOCHS} | others
    return [text for name, value in settings.items() for text in (f"--{name.replace('_', '-')}", str(value))]


def train_plainly(model: nn.Module, policy: Policy, groups: Any, schedule: Callable[[Any], Any]) -> list[float]:
    """Train two epochs of digits in a plain loop; `schedule(optimizer)` -> a function that is called each step."""
    train, _ = image_batches("digits", image_size=SIZE, batch_size=BATCH_SIZE)
    autoprec.apply_policy(model.train(), policy)
    optimizer = autoprec.build_optimizer(policy, torch.optim.AdamW, groups, lr=1e-3)
    scaler = autoprec.build_grad_scaler(policy, device="cpu")
    follow = schedule(optimizer)
    losses = []
    with autoprec.emulate():
        for epoch in range(NUM_EPOCHS):
            torch.manual_seed(epoch)
            for images, labels in train():
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(images), labels, label_smoothing=0.1)
                scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
                follow()
                losses.append(loss.item())
    return losses


def test_the_torchvision_shape_trains_as_a_plain_loop_and_goes_on_from_its_checkpoint(
    tmp_path: Path,
) -> None:
    script = load("torchvision_classification")
    given = arguments(TORCHVISION, tmp_path, model="shufflenet_v2_x0_5", output_dir=tmp_path)
    losses = script.main(given)

    torch.manual_seed(0)
    model = torchvision.models.get_model("shufflenet_v2_x0_5", num_classes=10)
    groups = script.set_weight_decay(model, 1e-2, 0.0)

    def schedule(optimizer: Any) -> Callable[[], None]:
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=NUM_EPOCHS)
        count = iter(range(1, 10**6))
        return lambda: cosine.step() if next(count) % (len(losses) // NUM_EPOCHS) == 0 else None

    assert len(losses) > 100
    assert losses == pytest.approx(train_plainly(model, TORCHVISION, groups, schedule), abs=1e-3)
    assert sum(losses[-10:]) < 0.9 * sum(losses[:10])
    checkpoint = torch.load(tmp_path / "model_0.pth", weights_only=True)
    assert checkpoint["scaler"]["scale"] == 2.0**7  # doubled at the 40th of 51 steps
    assert {(group["eps"], group["amsgrad"]) for group in checkpoint["optimizer"]["param_groups"]} == {(1e-6, True)}
    rest = script.main([*given, "--resume", str(tmp_path / "model_0.pth")])
    assert rest == losses[-len(rest) :]
    assert len(rest) == len(losses) // 2


def test_units_of_the_torchvision_shape_compute_in_the_policys_precision() -> None:
    model = autoprec.apply_policy(torchvision.models.get_model("shufflenet_v2_x0_5", num_classes=10), TORCHVISION)
    with autoprec.emulate(), watch_dtypes(model) as log:
        model(torch.randn(2, 3, SIZE, SIZE))
    units = {"conv1.0": FP32, "stage2.1.branch2.0": FP16, "stage3.1.branch2.0": FP16, "fc": FP32}
    assert {name: log[name].computed for name in units} == {name: {dtype} for name, dtype in units.items()}
    assert log["stage4.1.branch2.0"].computed == {BF16}


def test_the_timm_shape_trains_as_a_plain_loop_and_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    timm = pytest.importorskip("timm", reason="the extra `timm` is not installed")
    pytest.importorskip("timm.task", reason="this timm has no training tasks")
    script = load("timm_train")
    given = arguments(TIMM, tmp_path, output=tmp_path)
    losses = script.main(given)

    torch.manual_seed(0)
    model = timm.create_model("test_vit", num_classes=10, img_size=SIZE)
    groups = timm.optim.create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=0.05).param_groups
    kept = [{"params": group["params"], "weight_decay": group["weight_decay"]} for group in groups]

    def schedule(optimizer: Any) -> Callable[[], None]:
        cosine, _ = timm.scheduler.create_scheduler_v2(
            optimizer, num_epochs=NUM_EPOCHS, step_on_epochs=False, updates_per_epoch=len(losses) // NUM_EPOCHS
        )
        count = iter(range(1, 10**6))
        return lambda: cosine.step_update(next(count))

    assert len(losses) > 100
    assert losses == pytest.approx(train_plainly(model, TIMM, kept, schedule), abs=1e-3)
    assert sum(losses[-10:]) < 0.9 * sum(losses[:10])
    checkpoint = torch.load(tmp_path / "checkpoint-0.pth.tar", weights_only=True)
    assert checkpoint["amp_scaler"]["scale"] == 2.0**7
    assert {(group["eps"], group["amsgrad"]) for group in checkpoint["optimizer"]["param_groups"]} == {(1e-6, True)}
    rest = script.main([*given, "--resume", str(tmp_path / "checkpoint-0.pth.tar")])
    assert rest == losses[-len(rest) :]
    assert len(rest) == len(losses) // 2


def test_the_timm_shape_accumulates_and_units_compute_in_the_policys_precision(tmp_path: Path) -> None:
    timm = pytest.importorskip("timm", reason="the extra `timm` is not installed")
    pytest.importorskip("timm.task", reason="this timm has no training tasks")
    losses = load("timm_train").main(arguments(TIMM, tmp_path, batch_size=16, grad_accum_steps=2, epochs=1))
    assert len(losses) == 90
    assert sum(losses[-8:]) < sum(losses[:8])
    model = autoprec.apply_policy(timm.create_model("test_vit", num_classes=10, img_size=SIZE), TIMM)
    with autoprec.emulate(), watch_dtypes(model) as log:
        model(torch.randn(2, 3, SIZE, SIZE))
    units = {"patch_embed.proj": FP32, "blocks.0.attn.qkv": FP16, "blocks.1.attn.qkv": FP16, "head": FP32}
    assert {name: log[name].computed for name in units} == {name: {dtype} for name, dtype in units.items()}
    assert log["blocks.2.attn.qkv"].computed == {BF16}


@pytest.mark.parametrize("name", ["torchvision_classification", "timm_train"])
def test_a_wrong_policy_is_an_error_before_the_first_step(name: str, tmp_path: Path) -> None:
    if name == "timm_train":
        pytest.importorskip("timm.task", reason="timm is not installed, or has no training tasks")
    with pytest.raises(autoprec.AutoprecError, match="rules match no module"):
        load(name).main(arguments(Policy(modules={"layer9": "fp32"}), tmp_path))
