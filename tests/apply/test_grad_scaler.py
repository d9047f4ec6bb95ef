"""The policy's grad scaler does what torch's own suite asks of a grad scaler, and keeps the policy's numbers."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from autoprec import Policy, build_grad_scaler
from autoprec.apply import PolicyGradScaler
from autoprec.policy import GradScalerSettings

SETTINGS = GradScalerSettings(init_scale=128.0, growth_factor=2.0, backoff_factor=0.5, growth_interval=1)


def scaler(**changed: float) -> PolicyGradScaler:
    settings = SETTINGS.model_copy(update=changed)
    return build_grad_scaler(Policy(default="fp16", grad_scaler=settings), device="cpu")


def pair() -> tuple[nn.Linear, torch.optim.SGD, nn.Linear, torch.optim.SGD]:
    """Two equal models with an optimizer each: one to scale, one to compare with."""
    torch.manual_seed(0)
    scaled = nn.Linear(4, 4)
    plain = copy.deepcopy(scaled)
    return scaled, torch.optim.SGD(scaled.parameters(), lr=1.0), plain, torch.optim.SGD(plain.parameters(), lr=1.0)


def backward(model: nn.Module, own: PolicyGradScaler | None) -> None:
    loss = nn.functional.mse_loss(model(torch.ones(2, 4)), torch.zeros(2, 4))
    (loss if own is None else own.scale(loss)).backward()


@pytest.mark.parametrize("how", ["step", "unscale", "clip", "accumulate"])
@pytest.mark.parametrize("skipped", [None, 1], ids=["finite", "inf at the second step"])
def test_a_scaled_training_is_the_plain_one_and_a_step_with_inf_is_left_out(how: str, skipped: int | None) -> None:
    scaled, optimizer, plain, reference = pair()
    own = scaler()
    for number in range(4):
        for _ in range(2 if how == "accumulate" else 1):
            backward(scaled, own)
            backward(plain, None)
        if number == skipped:
            scaled.weight.grad[0, 0] = torch.inf
        if how in ("unscale", "clip"):
            own.unscale_(optimizer)
        if how == "clip":
            for model in (scaled, plain):
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        own.step(optimizer)
        own.update()
        if number != skipped:
            reference.step()
        optimizer.zero_grad()
        reference.zero_grad()
    for one, other in zip(scaled.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(one, other, rtol=1e-6, atol=1e-7)
    assert own.get_scale() == (128.0 * 2**4 if skipped is None else 128.0 * 2**3 * 0.5)


def test_growth_waits_for_its_interval_and_starts_anew_after_a_backoff() -> None:
    own = scaler(growth_interval=2)
    parameter = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    seen = []
    for gradient in (1.0, 1.0, 1.0, torch.inf, 1.0, 1.0):
        own.scale(parameter.sum())
        parameter.grad = torch.tensor([gradient])
        own.step(optimizer)
        own.update()
        seen.append(own.get_scale())
    assert seen == [128.0, 256.0, 256.0, 128.0, 128.0, 256.0]


def test_one_of_two_optimizers_is_left_out_where_its_gradients_overflow() -> None:
    own = scaler()
    parts = [nn.Parameter(torch.ones(1)) for _ in range(2)]
    optimizers = [torch.optim.SGD([part], lr=1.0) for part in parts]
    own.scale(sum(part.sum() for part in parts)).backward()
    assert parts[1].grad is not None
    parts[1].grad.fill_(torch.nan)
    for optimizer in optimizers:
        own.step(optimizer)
    own.update()
    assert [part.item() for part in parts] == [0.0, 1.0]
    assert own.get_scale() == 64.0


def test_a_sparse_gradient_is_unscaled_and_its_inf_is_found() -> None:
    for value, expected in ((1.0, 256.0), (torch.inf, 64.0)):
        own = scaler()
        table = nn.Parameter(torch.zeros(4, 2))
        optimizer = torch.optim.SGD([table], lr=1.0)
        own.scale(table.sum())
        values = torch.full((2, 2), value * 128.0)
        table.grad = torch.sparse_coo_tensor(torch.tensor([[1, 1]]), values, (4, 2), check_invariants=False)
        own.unscale_(optimizer)
        own.step(optimizer)
        own.update()
        assert own.get_scale() == expected
        assert table[1].tolist() == ([-2.0, -2.0] if value == 1.0 else [0.0, 0.0])


def test_calls_out_of_order_are_refused() -> None:
    own = scaler()
    parameter = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    with pytest.raises(AssertionError, match="_scale is None"):
        own.unscale_(optimizer)
    own.scale(parameter.sum()).backward()
    own.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="already been called"):
        own.unscale_(optimizer)
    own.step(optimizer)
    with pytest.raises(RuntimeError, match="already been called"):
        own.step(optimizer)


def test_half_gradients_are_refused() -> None:
    own = scaler()
    parameter = nn.Parameter(torch.ones(1, dtype=torch.float16))
    own.scale(parameter.float().sum()).backward()
    with pytest.raises(ValueError, match="unscale FP16 gradients"):
        own.unscale_(torch.optim.SGD([parameter], lr=1.0))


@pytest.mark.parametrize("lazy", [True, False], ids=["not used yet", "used"])
def test_its_state_travels_with_the_scale_and_the_growth_that_was_counted(lazy: bool) -> None:
    own, other = scaler(growth_interval=3), scaler(growth_interval=3, init_scale=2.0)
    if not lazy:
        parameter = nn.Parameter(torch.ones(1))
        own.scale(parameter.sum()).backward()
        own.step(torch.optim.SGD([parameter], lr=0.0))
        own.update()
    other.load_state_dict(own.state_dict())
    copied = pickle.loads(pickle.dumps(own))
    assert other.state_dict() == own.state_dict() == copied.state_dict()
    assert other.get_scale() == 128.0
    assert type(copied) is PolicyGradScaler


def test_a_scaler_that_is_off_changes_nothing() -> None:
    own = build_grad_scaler(Policy(default="bf16"), device="cpu")
    scaled, optimizer, plain, reference = pair()
    backward(scaled, own)
    backward(plain, None)
    own.step(optimizer)
    own.update()
    reference.step()
    assert torch.equal(scaled.weight, plain.weight)
    assert own.state_dict() == {}
    assert own.get_scale() == 1.0
