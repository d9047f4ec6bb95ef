"""Accelerate under a policy trains as autoprec's own loop does, also over a saved state."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("accelerate", reason="the extra `accelerate` is not installed")

from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import AutocastKwargs, DistributedType, GradScalerKwargs
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
from autoprec.emulation import is_emulating
from autoprec.errors import ApplyError, PrecisionWarning
from autoprec.integrations.accelerate import PolicyAccelerator
from autoprec.integrations.setting import PolicySetting
from autoprec.training import ScaleCollapsedError

pytestmark = pytest.mark.filterwarnings("ignore:.*is emulated here:autoprec.errors.PrecisionWarning")


@pytest.fixture(autouse=True)
def _fresh_state() -> Iterator[None]:
    """Accelerate keeps its state in class attributes, one for the process."""
    AcceleratorState._reset_state(True)
    yield
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


class Run:
    """An Accelerate loop as a user writes it."""

    def __init__(self, policy: Policy, *, seed: int = 0, accumulation_steps: int = 1, **arguments: Any) -> None:
        self.accelerator = PolicyAccelerator(
            policy, gradient_accumulation_steps=accumulation_steps, cpu=True, **arguments
        )
        self.net = network(seed)
        optimizer = torch.optim.Adam(self.net.parameters(), lr=LR)
        schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
        self.model, self.optimizer, self.schedule = self.accelerator.prepare(self.net, optimizer, schedule)

    def train(self, batches: Sequence[Any]) -> list[float]:
        losses = []
        for images, labels in batches:
            with self.accelerator.accumulate(self.model):
                loss = F.cross_entropy(self.model(images), labels)
                losses.append(float(loss.detach()))
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), CLIP)
                self.optimizer.step()
                self.schedule.step()
                self.optimizer.zero_grad()
        return losses


@pytest.mark.parametrize("policy", [POLICY, BF16, FP32_POLICY], ids=["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("accumulation_steps", [1, 2])
def test_the_losses_and_weights_are_those_of_a_plain_loop(policy: Policy, accumulation_steps: int) -> None:
    num_steps = NUM_STEPS // accumulation_steps
    plain, expected = train_plainly(policy, num_steps=num_steps, accumulation_steps=accumulation_steps)
    run = Run(policy, accumulation_steps=accumulation_steps, emulates=True)
    assert run.train(list(micro_batches(num_steps * accumulation_steps))) == pytest.approx(expected, abs=1e-3)
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
    assert run.accelerator.scaler is not None
    assert run.accelerator.scaler.get_scale() == 2.0**16  # 2**14, doubled at 20 and 40 good steps


def test_an_overflowing_step_is_skipped_and_its_schedule_waits() -> None:
    run = Run(POLICY.replace(grad_scaler={"init_scale": 2.0**38, "growth_interval": 2000}))
    before = copy.deepcopy(run.net.state_dict())
    run.train(list(micro_batches(1)))
    assert run.accelerator.optimizer_step_was_skipped
    assert all(torch.equal(before[name], value) for name, value in run.net.state_dict().items())
    assert run.accelerator.scaler is not None
    assert run.accelerator.scaler.get_scale() == 2.0**37
    assert run.schedule.scheduler.last_epoch == 0


def test_a_training_that_goes_on_from_a_saved_state_ends_as_one_that_was_not_broken_off(tmp_path: Path) -> None:
    batches = list(micro_batches(NUM_STEPS))
    whole = Run(POLICY)
    losses = whole.train(batches[:55])
    whole.accelerator.save_state(str(tmp_path))
    losses += whole.train(batches[55:])
    assert whole.accelerator.scaler is not None
    scale = whole.accelerator.scaler.state_dict()
    AcceleratorState._reset_state(True)
    rest = Run(POLICY, seed=1)
    rest.accelerator.load_state(str(tmp_path))
    assert rest.train(batches[55:]) == losses[55:]
    assert_same_weights(rest.net, whole.net)
    assert rest.accelerator.scaler is not None
    assert rest.accelerator.scaler.state_dict() == scale


def test_fp16_on_a_cpu_is_emulated_and_said_and_the_emulation_ends_with_the_forward() -> None:
    run = Run(POLICY)
    with pytest.warns(PrecisionWarning, match=r"half precision \(BF16 and FP16\) on a CPU is emulated here"):
        run.model(next(micro_batches(1))[0])
    assert not is_emulating()
    with pytest.raises(RuntimeError, match="channels"):
        run.model(torch.zeros(1, 3, 8, 8))
    assert not is_emulating()


def test_a_prepared_model_can_be_copied_and_pickled() -> None:
    run = Run(POLICY)
    image = next(micro_batches(1))[0]
    expected = run.model(image)
    assert torch.equal(copy.deepcopy(run.net)(image), expected)
    assert torch.equal(pickle.loads(pickle.dumps(run.net))(image), expected)


def test_evaluation_in_fp32_is_a_suspended_policy() -> None:
    run = Run(POLICY)
    image = next(micro_batches(1))[0]
    with autoprec.suspend_policy(run.accelerator.unwrap_model(run.model)), watching(run.net) as found:
        run.model(image)
    assert set.union(*found.values()) == {torch.float32}


@pytest.mark.parametrize("mixed_precision", ["bf16", "fp16"])
def test_mixed_precision_beside_the_policy_is_an_error(mixed_precision: str) -> None:
    with pytest.raises(ApplyError, match=f"mixed_precision is '{mixed_precision}' .* a second precision setting"):
        PolicyAccelerator(POLICY, mixed_precision=mixed_precision, cpu=True)


def test_mixed_precision_from_the_environment_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    with pytest.raises(ApplyError, match="ACCELERATE_MIXED_PRECISION"):
        PolicyAccelerator(POLICY, cpu=True)


@pytest.mark.parametrize("handler", [AutocastKwargs(), GradScalerKwargs(init_scale=2.0)], ids=["autocast", "scaler"])
def test_a_handler_of_precision_beside_the_policy_is_an_error(handler: Any) -> None:
    with pytest.raises(ApplyError, match="Kwargs is a second precision setting"):
        PolicyAccelerator(POLICY, cpu=True, kwargs_handlers=[handler])


def test_another_policy_on_the_model_and_autocast_around_it_are_errors() -> None:
    run = Run(POLICY)
    with pytest.raises(ApplyError, match="two precision settings"):
        run.accelerator.prepare(autoprec.apply_policy(network(), BF16))
    with torch.autocast("cpu"), pytest.raises(ApplyError, match="a second precision setting"):
        run.model(next(micro_batches(1))[0])
    assert run.model(next(micro_batches(1))[0]).dtype == torch.float32


def test_a_policy_that_does_not_fit_is_refused_and_the_model_stays_bare() -> None:
    net = network()
    accelerator = PolicyAccelerator(Policy(modules={"steam": "fp32"}), cpu=True)
    with pytest.raises(ApplyError, match="'steam'; nearest: stem"):
        accelerator.prepare(net)
    assert applied_policy(net) is None


def test_sharding_is_refused_by_name() -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.state.distributed_type = DistributedType.DEEPSPEED
    with pytest.raises(ApplyError, match=r"does not go with DEEPSPEED, .* allowed: NO, MULTI_CPU, MULTI_GPU"):
        PolicyAccelerator.adopt(accelerator, PolicySetting.of(POLICY))


def test_a_scale_that_runs_to_zero_ends_the_training() -> None:
    run = Run(POLICY)
    with torch.no_grad():
        run.net.stem.weight.mul_(1e9)
    with pytest.raises(ScaleCollapsedError, match="loss scale collapsed at step"):
        run.train(list(micro_batches(60)))
