"""The training step, against plain loops and hand-computed values."""

from __future__ import annotations

import math
import pickle
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn

from autoprec.apply import apply_policy
from autoprec.emulation import emulate
from autoprec.errors import ApplyError, TaskError
from autoprec.policy import Policy
from autoprec.training import ScaleCollapsedError, ScaleGuard, StepResult, TrainingStep, low_precision_parameters

HALF = Policy(default="autocast", dtype="fp16")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def scaler(**settings: float) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", **settings)


def weight(value: float = 1.0) -> nn.Parameter:
    return nn.Parameter(torch.tensor([value]))


def batches(num: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.randn(5, 3), torch.randn(5, 1)) for _ in range(num)]


def repeat(num_times: int, action: Callable[[], object]) -> None:
    for _ in range(num_times):
        action()


def squared_error(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


class TestAccumulation:
    @pytest.mark.parametrize("with_scaler", [False, True], ids=["scaler off", "scaler on"])
    def test_seven_batches_by_four_take_two_steps_equal_to_a_plain_loop(self, with_scaler: bool) -> None:
        data = batches(7)
        model, plain = nn.Linear(3, 1), nn.Linear(3, 1)
        plain.load_state_dict(model.state_dict())
        step = TrainingStep(
            torch.optim.SGD(model.parameters(), lr=0.1),
            grad_scaler=scaler() if with_scaler else None,
            accumulation_steps=4,
            max_grad_norm=0.5,
        )
        results = [step(squared_error(model, batch)) for batch in data] + [step.finish()]
        optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
        for window in (data[:4], data[4:]):
            optimizer.zero_grad()
            torch.stack([squared_error(plain, batch) for batch in window]).mean().backward()
            nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
            optimizer.step()
        assert [r is not None for r in results] == [False, False, False, True, False, False, False, True]
        assert step.num_steps_taken == 2
        for mine, reference in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine, reference, atol=1e-6, rtol=0)

    def test_three_batches_with_accumulation_four_take_one_step(self) -> None:
        model = nn.Linear(3, 1)
        step = TrainingStep(torch.optim.SGD(model.parameters(), lr=0.1), accumulation_steps=4)
        assert all(step(squared_error(model, batch)) is None for batch in batches(3))
        result = step.finish()
        assert result is not None
        assert (result.num_batches, step.num_steps_taken) == (3, 1)
        assert step.finish() is None

    def test_without_accumulation_fp32_is_bit_identical_to_a_plain_loop(self) -> None:
        model, plain = nn.Linear(3, 1), nn.Linear(3, 1)
        plain.load_state_dict(model.state_dict())
        step = TrainingStep(torch.optim.AdamW(model.parameters()))
        optimizer = torch.optim.AdamW(plain.parameters())
        for batch in batches(5):
            step(squared_error(model, batch))
            optimizer.zero_grad()
            squared_error(plain, batch).backward()
            optimizer.step()
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


class TestClipping:
    def test_clips_after_unscaling(self) -> None:
        p = weight(1.0)
        step = TrainingStep(torch.optim.SGD([p], lr=0.1), grad_scaler=scaler(), max_grad_norm=1.0)
        result = step(p.sum())
        assert p.item() == pytest.approx(0.9, abs=1e-7)
        assert result is not None
        assert result.grad_norm == 1.0
        assert result.scale == 65536.0

    def test_a_large_gradient_is_clipped_to_the_norm_and_reported_unclipped(self) -> None:
        p = weight(1.0)
        step = TrainingStep(torch.optim.SGD([p], lr=0.1), grad_scaler=scaler(), max_grad_norm=1.0)
        result = step((50 * p).sum())
        assert result is not None
        assert result.grad_norm == 50.0
        assert p.item() == pytest.approx(0.9, abs=1e-6)

    def test_infinite_gradients_skip_the_step_halve_the_scale_and_raise_nothing(self) -> None:
        p = weight(1.0)
        loss_scale = scaler()
        step = TrainingStep(torch.optim.SGD([p], lr=0.1), grad_scaler=loss_scale, max_grad_norm=1.0)
        result = step((p * math.inf).sum())
        assert result is not None
        assert (result.was_skipped, result.was_taken, result.grad_norm) == (True, False, None)
        assert (p.item(), loss_scale.get_scale()) == (1.0, 32768.0)


class TestSkipping:
    def test_a_changed_scale_is_not_a_skip(self) -> None:
        p = weight()
        loss_scale = scaler(init_scale=4.0, growth_interval=1)
        step = TrainingStep(torch.optim.SGD([p], lr=0.1), grad_scaler=loss_scale)
        result = step(p.sum())
        assert loss_scale.get_scale() == 8.0
        assert result is not None
        assert result.was_taken
        assert (step.num_steps_taken, step.num_steps_skipped) == (1, 0)

    @pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
    def test_the_scheduler_moves_only_with_real_steps(self, fused: bool) -> None:
        p = weight()
        optimizer = torch.optim.AdamW([p], lr=1.0, fused=fused)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        step = TrainingStep(optimizer, grad_scaler=scaler(), schedulers=[scheduler])
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for iteration in range(10):
                step((p * (math.inf if iteration in (0, 4, 5) else 1.0)).sum())
        assert scheduler.last_epoch == 7
        assert optimizer.param_groups[0]["lr"] == 0.5**7
        assert (step.num_steps, step.num_steps_taken, step.num_steps_skipped) == (10, 7, 3)

    def test_on_skip_sees_the_gradients_that_were_not_finite(self) -> None:
        a, b = weight(), weight()
        seen: list[tuple[int, bool, bool]] = []

        def look(number: int) -> None:
            assert a.grad is not None
            assert b.grad is not None
            seen.append((number, bool(a.grad.isfinite()), bool(b.grad.isfinite())))

        step = TrainingStep(torch.optim.SGD([a, b], lr=0.1), grad_scaler=scaler(), on_skip=look)
        step((a + b * math.inf).sum())
        assert seen == [(1, True, False)]
        assert a.grad is None

    def test_with_two_optimizers_only_the_one_with_infinite_gradients_is_held_back(self) -> None:
        a, b = weight(), weight()
        optimizers = [torch.optim.SGD([a], lr=0.1), torch.optim.SGD([b], lr=0.1)]
        schedulers = [torch.optim.lr_scheduler.StepLR(o, 1) for o in optimizers]
        loss_scale = scaler()
        step = TrainingStep(optimizers, grad_scaler=loss_scale, schedulers=schedulers)
        result = step((a + b * math.inf).sum())
        assert result is not None
        assert result.taken == (True, False)
        assert [s.last_epoch for s in schedulers] == [1, 0]
        assert (a.item(), b.item()) == (pytest.approx(0.9), 1.0)
        assert loss_scale.get_scale() == 32768.0  # updated once, not once for each optimizer


class TestALossForEachOptimizer:
    """Two networks that train against each other, as in a GAN."""

    def networks(self) -> nn.ModuleDict:
        torch.manual_seed(0)
        return nn.ModuleDict({"critic": nn.Linear(3, 1), "maker": nn.Linear(2, 3)})

    def critic_loss(self, nets: nn.ModuleDict, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        made = nets["maker"](batch[0]).detach()
        return (
            nn.functional.softplus(-nets["critic"](batch[1])).mean()
            + nn.functional.softplus(nets["critic"](made)).mean()
        )

    def maker_loss(self, nets: nn.ModuleDict, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return nn.functional.softplus(-nets["critic"](nets["maker"](batch[0]))).mean()

    @pytest.mark.parametrize("with_scaler", [False, True], ids=["scaler off", "scaler on"])
    @pytest.mark.parametrize("accumulation", [1, 2])
    def test_equals_a_plain_loop_in_which_each_steps_in_turn(self, accumulation: int, with_scaler: bool) -> None:
        data = [(torch.randn(5, 2), torch.randn(5, 3)) for _ in range(3 * accumulation)]
        windows = [data[i : i + accumulation] for i in range(0, len(data), accumulation)]
        nets, plain = self.networks(), self.networks()
        optimizers = [torch.optim.SGD(nets[name].parameters(), lr=0.5) for name in ("critic", "maker")]
        step = TrainingStep(optimizers, grad_scaler=scaler() if with_scaler else None, accumulation_steps=accumulation)
        results = []
        for window in windows:
            for place, loss in enumerate((self.critic_loss, self.maker_loss)):
                results += [step(loss(nets, batch), optimizer=place) for batch in window]
        for window in windows:
            for name, loss in (("critic", self.critic_loss), ("maker", self.maker_loss)):
                optimizer = torch.optim.SGD(plain[name].parameters(), lr=0.5)
                plain.zero_grad()
                torch.stack([loss(plain, batch) for batch in window]).mean().backward()
                optimizer.step()
        for mine, reference in zip(nets.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine, reference, atol=1e-6, rtol=0)
        ended = [result for result in results if result is not None]
        assert [result is not None for result in results] == [False] * (2 * accumulation - 1) + [True] + (
            [False] * (2 * accumulation - 1) + [True]
        ) * 2
        assert (step.num_steps, step.num_steps_taken) == (3, 3)
        assert all(result.taken == (True, True) for result in ended)

    def test_the_scaler_is_updated_once_a_step_and_the_norm_is_that_of_both(self) -> None:
        one, other = weight(), weight()
        loss_scale = scaler(growth_interval=2)
        step = TrainingStep([torch.optim.SGD([p], lr=0.1) for p in (one, other)], grad_scaler=loss_scale)
        for _ in range(2):
            assert step(3 * one.sum(), optimizer=0) is None
            result = step(4 * other.sum(), optimizer=1)
            assert result is not None
            assert result.grad_norm == 5.0
        assert loss_scale.get_scale() == 2 * 65536.0

    def test_an_overflow_of_one_skips_that_one_and_backs_off_once(self) -> None:
        one, other = weight(), weight()
        loss_scale = scaler()
        skipped: list[int] = []
        step = TrainingStep(
            [torch.optim.SGD([p], lr=0.1) for p in (one, other)], grad_scaler=loss_scale, on_skip=skipped.append
        )
        step((one * math.inf).sum(), optimizer=0)
        result = step(other.sum(), optimizer=1)
        assert result is not None
        assert (result.taken, result.was_skipped, result.grad_norm) == ((False, True), True, None)
        assert (one.item(), other.item(), loss_scale.get_scale()) == (1.0, pytest.approx(0.9), 32768.0)
        assert (skipped, step.num_steps_skipped) == ([1], 1)

    def test_the_last_windows_are_closed_one_after_the_other(self) -> None:
        one, other = weight(), weight()
        step = TrainingStep([torch.optim.SGD([p], lr=0.1) for p in (one, other)], accumulation_steps=4)
        for _ in range(3):
            step(one.sum(), optimizer=0)
        assert step.finish() is None
        for _ in range(3):
            step(2 * other.sum(), optimizer=1)
        result = step.finish()
        assert result is not None
        assert (one.item(), other.item(), step.num_steps) == (pytest.approx(0.9), pytest.approx(0.8), 1)

    @pytest.mark.parametrize("order", [[1], [0, 0], [0, None], [2], [0, 1, 1]], ids=str)
    def test_a_loss_out_of_turn_is_refused(self, order: list[int | None]) -> None:
        step = TrainingStep([torch.optim.SGD([weight()], lr=0.1) for _ in range(2)])
        parameters = [optimizer.param_groups[0]["params"][0] for optimizer in step.optimizers]
        *first, last = order
        for place in first:
            step(parameters[place or 0].sum(), optimizer=place)
        with pytest.raises(ValueError, match=rf"a loss of optimizer {last} came where that of optimizer \d was"):
            step(parameters[0].sum(), optimizer=last)


class TestScaleGuard:
    def test_a_loss_that_always_overflows_ends_before_the_scale_is_zero(self) -> None:
        p = weight()
        loss_scale = scaler()
        step = TrainingStep(torch.optim.SGD([p], lr=0.1), grad_scaler=loss_scale)
        with pytest.raises(ScaleCollapsedError, match="loss scale collapsed at step 31") as caught:
            repeat(200, lambda: step((p * math.inf).sum()))
        assert caught.value.step == 31  # 2^16 halved 31 times is 2^-15, the first below 2^-14
        assert loss_scale.get_scale() == 2.0**-15
        assert p.item() == 1.0

    def test_a_number_of_skips_in_a_row_is_a_collapse(self) -> None:
        guard = ScaleGuard(max_consecutive_skips=3)
        for number, skipped in enumerate([True, True, False, True, True], start=1):
            guard.check(step=number, scale=1.0, skipped=skipped)
        with pytest.raises(ScaleCollapsedError, match="3 steps in a row"):
            guard.check(step=6, scale=1.0, skipped=True)

    def test_a_small_scale_without_a_skip_is_no_collapse(self) -> None:
        p = weight()
        step = TrainingStep(torch.optim.SGD([p], lr=0.1), grad_scaler=scaler(init_scale=2.0**-20))
        assert step(p.sum()) is not None

    def test_a_floor_of_zero_is_refused(self) -> None:
        with pytest.raises(ValueError, match="min_scale is 0"):
            ScaleGuard(min_scale=0.0)

    def test_the_error_survives_pickling(self) -> None:
        error = pickle.loads(pickle.dumps(ScaleCollapsedError(step=3, scale=0.5, num_skipped=2)))
        assert (error.step, error.scale, error.num_skipped) == (3, 0.5, 2)


class TestMissingGradients:
    def test_an_optimizer_without_gradients_is_left_out_and_counted(self) -> None:
        a, b = weight(), weight()
        step = TrainingStep([torch.optim.SGD([a], lr=0.1), torch.optim.SGD([b], lr=0.1)], grad_scaler=scaler())
        result = step(a.sum())
        assert result is not None
        assert result.without_gradient == (False, True)
        assert result.was_taken
        assert step.num_steps_without_gradient == [0, 1]
        assert (a.item(), b.item()) == (pytest.approx(0.9), 1.0)

    def test_a_parameter_trained_on_alternate_steps_is_no_error(self) -> None:
        a, unused = weight(), weight()
        step = TrainingStep(torch.optim.SGD([a], lr=0.1), grad_scaler=scaler())
        for iteration in range(30):
            step(((a if iteration % 2 else unused) * 1.0).sum())
        assert step.num_steps_taken == 15
        assert step.num_steps_without_gradient == [15]

    def test_an_optimizer_that_never_gets_a_gradient_stops_with_one_message(self) -> None:
        a, other = weight(), weight()
        step = TrainingStep(torch.optim.SGD([a], lr=0.1), grad_scaler=scaler())
        with pytest.raises(TaskError, match="no parameter of the optimizer got a gradient in 10 steps"):
            repeat(10, lambda: step(other.sum()))

    def test_a_loss_of_frozen_parameters_alone_is_refused_and_nothing_is_unfrozen(self) -> None:
        model = nn.Linear(3, 1).requires_grad_(False)
        step = TrainingStep(torch.optim.SGD(model.parameters(), lr=0.1), grad_scaler=scaler())
        with pytest.raises(TaskError, match="the loss has no gradient"):
            step(squared_error(model, batches(1)[0]))
        assert not any(p.requires_grad for p in model.parameters())

    @pytest.mark.parametrize(
        ("loss", "message"),
        [(1.0, "float"), (torch.ones(2, requires_grad=True), r"shape \(2,\)"), (torch.tensor(1), "int64")],
        ids=["no tensor", "two values", "an integer"],
    )
    def test_a_loss_that_is_no_floating_scalar_is_refused(self, loss: object, message: str) -> None:
        step = TrainingStep(torch.optim.SGD([weight()], lr=0.1))
        with pytest.raises(TaskError, match=message):
            step(loss)  # type: ignore[arg-type]


class TestMasters:
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
    def test_trainable_half_parameters_are_listed_by_name(self, dtype: torch.dtype) -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).to(dtype))
        with pytest.raises(ApplyError, match=r"1\.weight \(b?float16\), 1\.bias"):
            TrainingStep(torch.optim.SGD(model.parameters(), lr=0.1), grad_scaler=scaler(), model=model)

    def test_without_a_model_they_are_named_by_their_place_in_the_optimizer(self) -> None:
        optimizer = torch.optim.SGD(nn.Linear(4, 2).half().parameters(), lr=0.1)
        with pytest.raises(ApplyError, match=r"group 0, parameter 0 \(2, 4\) \(float16\)"):
            TrainingStep(optimizer)

    def test_frozen_half_parameters_are_fine(self) -> None:
        model = nn.Sequential(nn.Linear(4, 4).half().requires_grad_(False), nn.Linear(4, 4))
        assert low_precision_parameters(model) == {}
        TrainingStep(torch.optim.SGD(model.parameters(), lr=0.1), model=model)

    @pytest.mark.parametrize("eps", [1e-8, 3e-8, 1e-7, 1e-4])
    def test_fp32_masters_keep_adam_safe_for_every_eps(self, eps: float) -> None:
        gradients = torch.tensor([0.0, 1e-4, 1e-2])
        p = nn.Parameter(torch.ones(3))
        step = TrainingStep(torch.optim.AdamW([p], lr=1e-3, eps=eps), grad_scaler=scaler())
        step((p.half().float() * gradients).sum())
        # Adam's first step is lr * g / (|g| + eps), after a weight decay of lr * 0.01
        expected = [1 - 1e-5 - 1e-3 * g / (g + eps) for g in gradients.tolist()]
        assert p.tolist() == pytest.approx(expected, abs=1e-6)

    def test_lifted_parameters_train_under_a_policy(self) -> None:
        model = nn.Linear(3, 1).half()
        apply_policy(model, HALF, lift_half_parameters=True)
        step = TrainingStep(torch.optim.SGD(model.parameters(), lr=0.1), grad_scaler=scaler(), model=model)
        with emulate():
            result = step(squared_error(model, batches(1)[0]))
        assert result is not None
        assert result.was_taken
        assert model.weight.dtype == torch.float32


class TestOptimizerKinds:
    def test_fused_and_clipped_variants_agree_and_all_skip_the_infinite_step(self) -> None:
        data = batches(5)
        start = nn.Linear(3, 1).state_dict()

        def train(*, fused: bool, clip: bool) -> tuple[torch.Tensor, list[StepResult | None]]:
            model = nn.Linear(3, 1)
            model.load_state_dict(start)
            step = TrainingStep(
                torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused),
                grad_scaler=scaler(),
                max_grad_norm=1e6 if clip else None,
            )
            factors = [1.0, 1.0, math.inf, 1.0, 1.0]
            results = [step(squared_error(model, b) * f) for b, f in zip(data, factors, strict=True)]
            return model.weight.detach(), results

        runs = [train(fused=fused, clip=clip) for fused in (False, True) for clip in (False, True)]
        for weights, results in runs:
            assert [r is not None and r.was_skipped for r in results] == [False, False, True, False, False]
            torch.testing.assert_close(weights, runs[0][0], atol=1e-5, rtol=0)

    def test_a_closure_optimizer_with_a_live_scaler_is_refused_before_the_first_step(self) -> None:
        with pytest.raises(ApplyError, match=r"LBFGS .* closure, which a grad scaler does not support"):
            TrainingStep(torch.optim.LBFGS([weight()]), grad_scaler=scaler())

    def test_a_closure_optimizer_with_a_disabled_scaler_equals_a_plain_loop(self) -> None:
        model, plain = nn.Linear(3, 1), nn.Linear(3, 1)
        plain.load_state_dict(model.state_dict())
        batch = batches(1)[0]
        step = TrainingStep(torch.optim.LBFGS(model.parameters(), max_iter=3), grad_scaler=scaler(enabled=False))
        loss, result = step.run_closure(lambda: squared_error(model, batch))
        optimizer = torch.optim.LBFGS(plain.parameters(), max_iter=3)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            value = squared_error(plain, batch)
            value.backward()
            return value.detach()

        expected = optimizer.step(closure)  # type: ignore[arg-type]
        assert result.was_taken
        assert loss.item() == float(expected)
        assert torch.equal(model.weight, plain.weight)
        with pytest.raises(ApplyError, match="run_closure"):
            step(squared_error(model, batch))

    def test_no_scaler_and_a_disabled_one_are_the_same(self) -> None:
        weights = []
        for loss_scale in (None, scaler(enabled=False)):
            p = weight()
            step = TrainingStep(torch.optim.SGD([p], lr=0.1), grad_scaler=loss_scale)
            result = step((3 * p).sum())
            assert result is not None
            assert result.scale is None
            weights.append(p.item())
        assert weights[0] == weights[1] == pytest.approx(0.7)

    @pytest.mark.parametrize(
        "settings", [{"accumulation_steps": 0}, {"max_grad_norm": 0.0}], ids=["no batches", "no norm"]
    )
    def test_settings_out_of_range_are_refused(self, settings: dict[str, float]) -> None:
        with pytest.raises(ValueError, match=next(iter(settings))):
            TrainingStep(torch.optim.SGD([weight()], lr=0.1), **settings)  # type: ignore[arg-type]
