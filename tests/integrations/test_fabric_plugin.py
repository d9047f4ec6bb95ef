"""Fabric under a policy trains as autoprec's own loop does, also over a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("lightning", reason="the extra `lightning` is not installed")

import lightning
from digits_training import (
    BF16,
    CLIP,
    COMPUTED,
    FP32_POLICY,
    LR,
    NUM_STEPS,
    POLICY,
    assert_same_weights,
    micro_batches,
    network,
    train_plainly,
    watching,
)

import autoprec
from autoprec import Policy
from autoprec.apply import applied_policy
from autoprec.errors import ApplyError, PrecisionWarning
from autoprec.integrations.lightning import FabricPolicyPrecision

pytestmark = pytest.mark.filterwarnings("ignore:.*is emulated here:autoprec.errors.PrecisionWarning")


class Run:
    """A Fabric loop as a user writes it."""

    def __init__(self, policy: Policy, *, seed: int = 0, **arguments: Any) -> None:
        self.plugin = FabricPolicyPrecision(policy, **arguments)
        self.fabric = lightning.Fabric(accelerator="cpu", plugins=self.plugin)
        self.net = network(seed)
        self.model, self.optimizer = self.fabric.setup(self.net, torch.optim.Adam(self.net.parameters(), lr=LR))

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "precision": self.plugin}

    def train(self, batches: Sequence[Any], *, accumulation_steps: int = 1) -> list[float]:
        losses = []
        for number, (images, labels) in enumerate(batches, start=1):
            loss = F.cross_entropy(self.model(images), labels)
            losses.append(float(loss.detach()))
            self.fabric.backward(loss / accumulation_steps)
            if number % accumulation_steps == 0:
                self.fabric.clip_gradients(self.model, self.optimizer, max_norm=CLIP, error_if_nonfinite=False)
                self.optimizer.step()
                self.optimizer.zero_grad()
        return losses


@pytest.mark.parametrize("policy", [POLICY, BF16, FP32_POLICY], ids=["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("accumulation_steps", [1, 2])
def test_the_losses_and_weights_are_those_of_a_plain_loop(policy: Policy, accumulation_steps: int) -> None:
    num_steps = NUM_STEPS // accumulation_steps
    plain, expected = train_plainly(policy, num_steps=num_steps, accumulation_steps=accumulation_steps)
    run = Run(policy, emulates=True)
    batches = list(micro_batches(num_steps * accumulation_steps))
    assert run.train(batches, accumulation_steps=accumulation_steps) == pytest.approx(expected, abs=1e-3)
    assert_same_weights(run.net, plain)


def test_each_unit_computes_in_the_policys_precision() -> None:
    run = Run(POLICY)
    with autoprec.emulate(), watching(run.net) as found:
        run.model(next(micro_batches(1))[0])
    assert found == COMPUTED


def test_the_policys_scaler_and_optimizer_settings_are_used() -> None:
    run = Run(POLICY)
    run.train(list(micro_batches(50)))
    group = run.optimizer.param_groups[0]
    assert (group["eps"], group["amsgrad"]) == (1e-6, True)
    assert run.plugin.scaler is not None
    assert run.plugin.scaler.get_scale() == 2.0**16  # 2**14, doubled at 20 and 40 good steps


def test_a_training_that_goes_on_from_a_checkpoint_ends_as_one_that_was_not_broken_off(tmp_path: Path) -> None:
    batches = list(micro_batches(NUM_STEPS))
    whole = Run(POLICY)
    losses = whole.train(batches[:55])
    whole.fabric.save(tmp_path / "middle.ckpt", whole.state)
    losses += whole.train(batches[55:])
    rest = Run(POLICY, seed=1)
    rest.fabric.load(tmp_path / "middle.ckpt", rest.state)
    assert rest.train(batches[55:]) == losses[55:]
    assert_same_weights(rest.net, whole.net)
    assert rest.plugin.state_dict() == whole.plugin.state_dict()


def test_fp16_on_a_cpu_is_emulated_and_said() -> None:
    run = Run(POLICY)
    with pytest.warns(PrecisionWarning, match=r"half precision \(BF16 and FP16\) on a CPU is emulated here"):
        run.train(list(micro_batches(1)))


def test_a_model_that_is_about_to_move_to_a_gpu_gets_its_policy_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    run = Run(POLICY)
    assert applied_policy(run.net) is None
    run.model(next(micro_batches(1))[0])
    assert applied_policy(run.net) == POLICY


def test_a_backward_that_goes_around_the_scaler_is_an_error() -> None:
    run = Run(POLICY)
    images, labels = next(micro_batches(1))
    with pytest.raises(RuntimeError, match=r"call `fabric\.backward"):
        F.cross_entropy(run.model(images), labels).backward()


def test_a_second_precision_setting_is_an_error() -> None:
    with pytest.raises(ValueError, match="Received both `precision=bf16-mixed` and `plugins="):
        lightning.Fabric(accelerator="cpu", plugins=FabricPolicyPrecision(POLICY), precision="bf16-mixed")
    run = Run(POLICY)
    with torch.autocast("cpu"), pytest.raises(ApplyError, match="a second precision setting"):
        run.model(next(micro_batches(1))[0])
    with pytest.raises(ApplyError, match="two precision settings"):
        run.fabric.setup(autoprec.apply_policy(network(), BF16))


def test_a_closure_optimizer_is_refused_under_fp16() -> None:
    run = Run(Policy(default="fp16"))
    optimizer = run.fabric.setup_optimizers(torch.optim.LBFGS(run.net.parameters()))
    images, labels = next(micro_batches(1))
    run.fabric.backward(F.cross_entropy(run.model(images), labels))
    with pytest.raises(ApplyError, match="LBFGS evaluates the loss in a closure"):
        optimizer.step(lambda: torch.zeros(()))
