"""A trial: the same as a plain loop where nothing is special, a result with its kind where something is."""

from __future__ import annotations

import gc
import json
import math
import random
import re
import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_tasks import (
    Adversaries,
    batches,
    critic_loss,
    cross_entropy,
    gan_task,
    maker_loss,
    network,
    small_task,
)
from torch import nn

from autoprec.errors import TaskError
from autoprec.policy import GradScalerSettings, OptimizerSettings, Policy
from autoprec.tasks import TargetShape, vision_task
from autoprec.trials import Outcome, TrialSettings, run_trial, target
from autoprec.trials.aborting import AbortRules

FP32 = Policy(default="fp32")
AUTOCAST = Policy(default="autocast", dtype="fp16")
HALF = Policy(default="fp16")
BF16 = Policy(default="autocast", dtype="bf16")
SHORT = TrialSettings(warmup_steps=2, measured_steps=5, batchnorm_batches=3)


def comparable(outcome: Outcome) -> dict[str, Any]:
    return outcome.model_dump(exclude={"wall_seconds", "step_seconds_here", "phase_seconds"})


class TestOrdinary:
    def test_fp32_losses_are_bit_identical_to_a_plain_loop_over_20_steps(self) -> None:
        outcome = run_trial(small_task(), FP32, TrialSettings(seed=3, warmup_steps=5, measured_steps=15))
        torch.manual_seed(3)
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        losses = []
        data = batches(0)
        for index in range(20):
            optimizer.zero_grad()
            loss = cross_entropy(model, data[index % len(data)])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert outcome.train_losses == losses
        assert outcome.kind == "ok"

    def test_the_outcome_is_whole_and_labelled(self) -> None:
        outcome = run_trial(small_task(), FP32, SHORT)
        assert outcome.accuracy is not None
        assert outcome.eval_loss is not None
        assert outcome.peak_memory_bytes is not None
        assert outcome.throughput_samples_per_second is not None
        assert (outcome.accuracy.kind, outcome.eval_loss.kind) == ("measured", "measured")
        assert outcome.peak_memory_bytes.kind == "computed"
        assert outcome.throughput_samples_per_second.kind == "predicted"
        assert (outcome.num_steps_taken, outcome.num_steps_skipped, outcome.scale_history) == (7, 0, [])
        assert len(outcome.grad_norms) == len(outcome.train_losses) == 7
        assert sum(outcome.memory_by_category.values()) == pytest.approx(outcome.peak_memory_bytes.value)
        assert outcome.step_seconds_here is not None
        assert Outcome.model_validate_json(outcome.model_dump_json()) == outcome

    @pytest.mark.parametrize("policy", [AUTOCAST, HALF], ids=["autocast", "fp16"])
    def test_fp16_on_a_cpu_is_emulated_and_said_to_be(self, policy: Policy) -> None:
        outcome = run_trial(small_task(), policy, SHORT)
        reference = run_trial(small_task(), FP32, SHORT)
        assert outcome.is_ok
        assert outcome.accuracy is not None
        assert outcome.accuracy.kind == "emulated"
        assert outcome.scale_history[0] == 65536.0
        assert outcome.train_losses == pytest.approx(reference.train_losses, rel=2e-2)
        assert outcome.train_losses != reference.train_losses

    def test_fp16_without_emulation_is_measured(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            outcome = run_trial(small_task(), AUTOCAST, SHORT.model_copy(update={"emulate": False}))
        assert outcome.accuracy is not None
        assert outcome.accuracy.kind == "measured"

    def test_a_trial_gives_the_same_whatever_ran_before_it(self) -> None:
        task = small_task()
        alone = run_trial(task, BF16, SHORT)
        run_trial(task, FP32, SHORT)
        torch.rand(17)
        assert comparable(run_trial(task, BF16, SHORT)) == comparable(alone)

    def test_another_seed_is_another_training(self) -> None:
        task = small_task()
        one, other = (run_trial(task, FP32, SHORT.model_copy(update={"seed": seed})) for seed in (0, 1))
        assert one.train_losses != other.train_losses

    def test_what_the_model_draws_does_not_move_the_data(self) -> None:
        seen: dict[float, list[int]] = {0.0: [], 0.5: []}

        def shuffled() -> Iterator[Any]:
            data = batches(0)
            for index in torch.randperm(len(data)).tolist():
                yield data[index]

        for share, firsts in seen.items():

            def loss(model: nn.Module, batch: Any, firsts: list[int] = firsts) -> torch.Tensor:
                firsts.append(int(batch[0][0, 0] * 1e4))
                return cross_entropy(model, batch)

            model = lambda share=share: nn.Sequential(nn.Dropout(share), nn.Linear(4, 2))  # noqa: E731
            run_trial(small_task(model=model, train_batches=shuffled, loss=loss), FP32, SHORT)
        assert seen[0.0][:7] == seen[0.5][:7]

    def test_a_vision_model_trains_in_each_precision(self) -> None:
        task = vision_task("resnet18", target_image_size=128, target_batch_size=32)
        settings = TrialSettings(warmup_steps=1, measured_steps=1, batchnorm_batches=1)
        peaks = []
        for policy in (FP32, AUTOCAST.replace(grad_scaler=GradScalerSettings(init_scale=64.0))):
            outcome = run_trial(task, policy, settings)
            assert outcome.is_ok, outcome.message
            assert outcome.peak_memory_bytes is not None
            peaks.append(outcome.peak_memory_bytes.value)
        assert peaks[1] < peaks[0]


class TestTask:
    def test_accumulation_takes_as_many_batches_to_a_step(self) -> None:
        seen: list[int] = []

        def loss(model: nn.Module, batch: Any) -> torch.Tensor:
            if model.training:
                seen.append(len(batch[0]))
            return cross_entropy(model, batch)

        outcome = run_trial(small_task(loss=loss, accumulation_steps=3), FP32, SHORT)
        assert (outcome.num_steps_taken, len(outcome.train_losses)) == (7, 7)
        assert len(seen) >= 21

    @pytest.mark.parametrize("with_own", [False, True], ids=["annealed", "own schedule"])
    def test_annealing_ends_at_zero_unless_the_task_has_a_schedule(self, with_own: bool) -> None:
        made: list[torch.optim.Optimizer] = []

        def optimizer(parameters: Any) -> torch.optim.Optimizer:
            made.append(torch.optim.SGD(parameters, lr=0.5))
            return made[-1]

        own = (lambda o, num_steps: torch.optim.lr_scheduler.ConstantLR(o, 1.0, num_steps)) if with_own else None
        task = small_task(optimizer=optimizer, scheduler=own)
        assert run_trial(task, FP32, SHORT.model_copy(update={"anneal": True})).is_ok
        assert made[0].param_groups[0]["lr"] == pytest.approx(0.5 if with_own else 0.0, abs=1e-12)

    def test_an_optimizer_made_by_a_function_gets_the_policys_eps(self) -> None:
        made: list[torch.optim.Optimizer] = []

        def optimizer(parameters: Any) -> torch.optim.Optimizer:
            made.append(torch.optim.AdamW(parameters))
            return made[-1]

        run_trial(small_task(optimizer=optimizer), FP32.replace(optimizer=OptimizerSettings(eps=1e-5)), SHORT)
        assert {optimizer.param_groups[0]["eps"] for optimizer in made} == {1e-5}

    def test_lazy_modules_get_their_shapes_before_the_optimizer(self) -> None:
        task = small_task(model=lambda: nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.LazyLinear(2)))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Lazy modules are a new feature")
            outcome = run_trial(task, FP32, SHORT)
        assert outcome.is_ok, outcome.message

    def test_frozen_parts_train_around(self) -> None:
        def model() -> nn.Module:
            net = network()
            net[0].requires_grad_(False)  # type: ignore[index]
            return net

        assert run_trial(small_task(model=model), AUTOCAST, SHORT).is_ok

    def test_a_last_batch_of_one_is_left_out_with_a_note(self) -> None:
        short = (torch.randn(1, 4), torch.zeros(1, dtype=torch.long))
        outcome = run_trial(small_task(train_batches=[*batches(0, num_batches=2), short]), FP32, SHORT)
        assert outcome.is_ok, outcome.message
        assert outcome.notes == ["a training batch of one sample was left out: normalisation needs at least two"]

    def test_a_one_shot_iterator_says_how_many_batches_it_gave(self) -> None:
        outcome = run_trial(small_task(train_batches=iter(batches(0, num_batches=5))), FP32, TrialSettings())
        assert outcome.kind == "user_error"
        assert "gave only 5 of 28 batches" in outcome.message


class TestSeveralOptimizers:
    def test_a_gan_in_fp32_is_bit_identical_to_a_plain_loop(self) -> None:
        outcome = run_trial(gan_task(), FP32, SHORT)
        torch.manual_seed(0)
        nets = Adversaries()
        parts = {"critic": critic_loss, "maker": maker_loss}
        optimizers = {name: torch.optim.Adam(nets.get_submodule(name).parameters(), 1e-3, (0.5, 0.9)) for name in parts}
        expected = []
        for index in range(7):
            total = 0.0
            for name, loss_of in parts.items():
                nets.zero_grad()
                loss = loss_of(nets, batches(0)[index % 6])
                loss.backward()
                optimizers[name].step()
                total += loss.item()
            expected.append(total)
        assert outcome.is_ok, outcome.message
        assert outcome.train_losses == expected
        assert (outcome.num_steps_taken, outcome.num_steps_skipped) == (7, 0)

    @pytest.mark.parametrize("policy", [AUTOCAST, HALF, BF16], ids=["autocast", "fp16", "bf16"])
    def test_a_gan_trains_in_half_with_one_scaler(self, policy: Policy) -> None:
        outcome, reference = run_trial(gan_task(), policy, SHORT), run_trial(gan_task(), FP32, SHORT)
        assert outcome.is_ok, outcome.message
        assert outcome.train_losses == pytest.approx(reference.train_losses, rel=2e-2)
        assert outcome.train_losses != reference.train_losses
        assert outcome.scale_history == ([65536.0] * 7 if policy.needs_grad_scaler else [])

    def test_memory_is_that_of_one_part_after_the_other(self) -> None:
        wide = {"model": lambda: WideAdversaries(64), "train_batches": batches(0, size=512)}
        one_by_one = run_trial(gan_task(**wide), FP32, SHORT)
        at_once = run_trial(gan_task(**wide, losses={}), FP32, SHORT)
        assert one_by_one.is_ok, one_by_one.message
        assert one_by_one.peak_memory_bytes is not None
        assert at_once.peak_memory_bytes is not None
        assert one_by_one.notes == []
        assert 0.3 < one_by_one.peak_memory_bytes.value / at_once.peak_memory_bytes.value < 0.9

    def test_each_part_may_have_an_optimizer_of_its_own_kind(self) -> None:
        made: dict[str, torch.optim.Optimizer] = {}

        def maker_optimizer(parameters: Any) -> torch.optim.Optimizer:
            made["maker"] = torch.optim.SGD(parameters, lr=0.1)
            return made["maker"]

        optimizer = {"critic": torch.optim.Adam, "maker": maker_optimizer}
        outcome = run_trial(gan_task(optimizer=optimizer), FP32, SHORT)
        assert outcome.is_ok, outcome.message
        assert sum(len(group["params"]) for group in made["maker"].param_groups) == 4

    def test_several_optimizers_of_one_loss_equal_a_plain_loop(self) -> None:
        def optimizers(parameters: Any) -> list[torch.optim.Optimizer]:
            matrices, rest = [p for p in parameters if p.ndim > 1], [p for p in parameters if p.ndim < 2]
            return [torch.optim.SGD(matrices, lr=0.1), torch.optim.Adam(rest, lr=0.01)]

        outcome = run_trial(small_task(optimizer=optimizers), FP32, SHORT)
        torch.manual_seed(0)
        model = network()
        both = optimizers(list(model.parameters()))
        expected = []
        for index in range(7):
            loss = cross_entropy(model, batches(0)[index % 6])
            model.zero_grad()
            loss.backward()
            for optimizer in both:
                optimizer.step()
            expected.append(loss.item())
        assert outcome.train_losses == expected

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"losses": {"critik": critic_loss, "maker": maker_loss}}, "losses names 'critik'.*nearest: critic"),
            ({"optimizer": lambda parameters: [torch.optim.SGD(parameters)] * 2}, "2 optimizers for 'critic'"),
            ({"optimizer": lambda parameters: []}, "returned nothing"),
        ],
        ids=["no such part", "two for a part", "none"],
    )
    def test_what_does_not_fit_is_named(self, changes: dict[str, Any], words: str) -> None:
        outcome = run_trial(gan_task(**changes), FP32, SHORT)
        assert outcome.kind == "user_error"
        assert re.search(words, outcome.message), outcome.message

    def test_optimizers_for_other_parts_than_the_losses_are_refused(self) -> None:
        with pytest.raises(TaskError, match=r"optimizer is a mapping of \['maker'\] and losses one of \['critic', 'ma"):
            gan_task(optimizer={"maker": torch.optim.Adam})


class WideAdversaries(Adversaries):
    def __init__(self, width: int) -> None:
        nn.Module.__init__(self)
        self.critic = nn.Sequential(
            nn.Linear(4, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1)
        )
        self.maker = nn.Sequential(
            nn.Linear(2, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 4)
        )


class TestIsolation:
    def test_random_states_and_switches_come_back(self) -> None:
        def model() -> nn.Module:
            torch.use_deterministic_algorithms(True, warn_only=True)
            torch.set_default_dtype(torch.float64)
            torch.set_default_dtype(torch.float32)
            torch.backends.cudnn.benchmark = True
            torch.backends.mha.set_fastpath_enabled(False)
            torch.set_grad_enabled(True)
            return network()

        random.seed(5)
        np.random.seed(5)
        torch.manual_seed(5)
        expected = (random.random(), np.random.rand(), torch.rand(1).item())
        random.seed(5)
        np.random.seed(5)
        torch.manual_seed(5)
        run_trial(small_task(model=model), AUTOCAST, SHORT)
        assert (random.random(), np.random.rand(), torch.rand(1).item()) == expected
        assert not torch.are_deterministic_algorithms_enabled()
        assert not torch.backends.cudnn.benchmark
        assert torch.backends.mha.get_fastpath_enabled()
        assert not torch.is_autocast_enabled("cpu")

    @pytest.mark.parametrize("policy", [FP32, AUTOCAST, HALF], ids=["fp32", "autocast", "fp16"])
    @pytest.mark.parametrize("fails", [False, True], ids=["ok", "out of memory"])
    def test_nothing_of_a_trial_is_alive_after_it(self, policy: Policy, fails: bool) -> None:
        alive: list[weakref.ref[Any]] = []

        def model() -> nn.Module:
            net = network()
            alive.append(weakref.ref(net))
            alive.extend(weakref.ref(parameter) for parameter in net.parameters())
            return net

        def loss(net: nn.Module, batch: Any) -> torch.Tensor:
            value = cross_entropy(net, batch)
            alive.append(weakref.ref(value))
            if fails and len(alive) > 8:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            return value

        run_trial(small_task(model=model, loss=loss), policy, SHORT)
        assert alive
        assert [reference() for reference in alive] == [None] * len(alive)

    def test_out_of_memory_in_one_trial_does_not_touch_the_next(self) -> None:
        number = 0

        def model() -> nn.Module:
            nonlocal number
            number += 1
            return network()

        def loss(net: nn.Module, batch: Any) -> torch.Tensor:
            if number == 3:  # a trial builds the model twice: for the training and for the target shape
                raise torch.OutOfMemoryError("CUDA out of memory")
            return cross_entropy(net, batch)

        task = small_task(model=model, loss=loss)
        outcomes = [run_trial(task, BF16, SHORT) for _ in range(4)]
        assert [outcome.kind for outcome in outcomes] == ["ok", "out_of_memory", "ok", "ok"]
        assert comparable(outcomes[2]) == comparable(outcomes[3]) == comparable(outcomes[0])

    def test_many_trials_leave_no_tensors_behind(self) -> None:
        task = small_task()
        counts = []
        for _ in range(4):
            run_trial(task, AUTOCAST, SHORT)
            gc.collect()
            counts.append(sum(issubclass(type(item), torch.Tensor) for item in gc.get_objects()))
        assert counts[1] == counts[2] == counts[3]


class TestTarget:
    def test_equal_policies_are_estimated_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        calls: list[Policy] = []
        real = target.estimate_step

        def counted(*args: Any, **settings: Any) -> Any:
            calls.append(settings["policy"])
            return real(*args, **settings)

        monkeypatch.setattr(target, "estimate_step", counted)
        task = small_task()
        for policy in (AUTOCAST, AUTOCAST, AUTOCAST.replace(modules={"0": "autocast"}), HALF):
            run_trial(task, policy, SHORT)
        assert calls == [AUTOCAST, HALF]

    def test_what_fails_at_the_target_shape_says_so(self) -> None:
        def too_large() -> Any:
            raise torch.OutOfMemoryError("CUDA out of memory")

        task = small_task(target=TargetShape(make_batch=too_large, batch_size=4))
        outcome = run_trial(task, FP32, SHORT)
        assert outcome.kind == "out_of_memory"
        assert outcome.message.startswith("at the target shape: ")


class Overflowing(nn.Module):
    """A wide sum that exceeds FP16's largest value behind two harmless layers (C35)."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.wide = nn.Linear(2048, 1, bias=False)
        nn.init.constant_(self.wide.weight, 1.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.second(self.first(x))
        total = self.wide(torch.full((len(x), 2048), 60.0))
        return y[:, :2] + total * 1e-6


class GradientOverflow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * math.inf if gradient.dtype == torch.float16 else gradient


class OverflowsInBackward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = GradientOverflow.apply(self.inside(x))  # type: ignore[no-untyped-call]
        return y


class IndexPut(nn.Module):
    """Writes half values into an FP32 embedding (C07)."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 2)
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.table(torch.arange(len(x))).clone()
        mask = torch.ones(len(x), dtype=torch.bool)
        h[mask] = self.head(x)
        return h


def conv_batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Normal batches with one of size 1e5 among them, the third (C34)."""
    generator = torch.Generator().manual_seed(0)
    data = [torch.randn(8, 3, 6, generator=generator) for _ in range(5)]
    data[2] = data[2] * 1e5
    return [(x, torch.arange(8) % 2) for x in data]


def conv_network() -> nn.Module:
    return nn.Sequential(nn.Conv1d(3, 16, 3), nn.BatchNorm1d(16), nn.Flatten(), nn.Linear(64, 2))


class TestKinds:
    def test_a_layer_that_overflows_is_named(self) -> None:
        task = small_task(model=Overflowing)
        outcome = run_trial(task, HALF, SHORT)
        assert (outcome.kind, outcome.step) == ("non_finite_loss", 1)
        assert outcome.first_non_finite is not None
        assert outcome.first_non_finite.module == "wide"
        assert "finite input" in outcome.first_non_finite.what
        assert "'wide'" in outcome.message
        assert run_trial(task, Policy(default="fp16", modules={"wide": "fp32"}), SHORT).is_ok
        assert run_trial(task, BF16, SHORT).is_ok

    def test_poisoned_running_statistics_end_the_trial_with_their_name_and_step(self) -> None:
        task = small_task(model=conv_network, train_batches=conv_batches(), eval_batches=conv_batches()[:2])
        outcome = run_trial(task, HALF, SHORT)
        assert (outcome.kind, outcome.step) == ("non_finite_buffer", 3)
        assert "buffer 1.running_mean at step 3" in outcome.message
        assert run_trial(task, FP32, SHORT).is_ok

    def test_more_skipped_steps_than_are_allowed_end_the_trial_at_once(self) -> None:
        rules = AbortRules(max_skip_rate=0.25, max_loss_gap=0.5)
        settings = TrialSettings(warmup_steps=4, measured_steps=12, abort=rules)
        outcome = run_trial(small_task(model=OverflowsInBackward), HALF, settings)
        assert (outcome.kind, outcome.step) == ("aborted", 5)
        assert (outcome.num_steps_taken, outcome.num_steps_skipped, outcome.skip_rate) == (0, 5, 5 / 16)
        assert outcome.message == "5 of 5 steps were skipped; 4 of 16 are allowed"
        assert outcome.first_non_finite is not None
        assert outcome.first_non_finite.module == "inside"

    def test_gradients_that_always_overflow_take_no_step(self) -> None:
        outcome = run_trial(small_task(model=OverflowsInBackward), HALF, SHORT)
        assert outcome.kind == "no_step_taken"
        assert (outcome.num_steps_taken, outcome.num_steps_skipped, outcome.skip_rate) == (0, 7, 1.0)
        assert outcome.grad_norms == [None] * 7
        assert outcome.scale_history == [2.0 ** (16 - n) for n in range(7)]
        assert outcome.first_non_finite is not None
        assert outcome.first_non_finite.module == "inside"

    def test_a_scale_that_runs_down_collapses_with_the_step(self) -> None:
        settings = TrialSettings(warmup_steps=0, measured_steps=60)
        outcome = run_trial(small_task(model=OverflowsInBackward), HALF, settings)
        assert (outcome.kind, outcome.step) == ("scale_collapsed", 31)
        assert "loss scale collapsed at step 31" in outcome.message

    def test_an_operator_that_refuses_half_is_unsupported_and_named(self) -> None:
        outcome = run_trial(small_task(model=IndexPut), AUTOCAST, SHORT)
        assert outcome.kind == "unsupported"
        assert "Index put requires the source and destination dtypes match" in outcome.message
        assert run_trial(small_task(model=IndexPut), FP32, SHORT).is_ok

    def test_a_policy_for_another_model_is_unsupported(self) -> None:
        outcome = run_trial(small_task(), AUTOCAST.replace(modules={"layer9": "fp32"}), SHORT)
        assert outcome.kind == "unsupported"
        assert "layer9" in outcome.message

    def test_the_users_own_error_comes_with_its_traceback_and_no_private_path(self) -> None:
        def loss(model: nn.Module, batch: Any) -> torch.Tensor:
            return model(batch[0].flatten())

        outcome = run_trial(small_task(loss=loss), FP32, SHORT)
        assert (outcome.kind, outcome.step) == ("user_error", 1)
        assert "mat1 and mat2 shapes" in outcome.message or "size mismatch" in outcome.message
        assert "in module '0'" in outcome.message
        assert "return model(batch[0].flatten())" in outcome.traceback
        assert str(Path(__file__).parent) not in outcome.traceback

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"model": lambda: 3}, r"model\(\) returned int"),
            ({"model": lambda: network().requires_grad_(False)}, "no parameter of Sequential is trainable"),
            ({"train_batches": []}, "there are 0 training batches"),
            ({"eval_batches": []}, "there are 0 held-out batches"),
            ({"train_batches": 5}, "train_batches is int"),
            ({"loss": lambda m, b: 1.0}, "the loss is float"),
            ({"loss": lambda m, b: m(b[0])}, r"the loss is Tensor of shape \(8, 2\)"),
            ({"loss": lambda m, b: cross_entropy(m, b).detach()}, "the loss has no gradient"),
            ({"metric": lambda m, b: "good"}, "the metric returned str"),
            ({"optimizer": torch.optim.LBFGS}, "LBFGS evaluates the loss in a closure"),
            ({"optimizer": lambda p: None}, r"optimizer\(\) returned NoneType"),
            ({"metric": lambda m, b: math.nan}, "accuracy is nan on the held-out data"),
        ],
        ids=lambda value: "" if isinstance(value, dict) else value[:24],
    )
    def test_a_wrong_task_is_a_user_error_with_one_clear_message(self, changes: dict[str, Any], message: str) -> None:
        outcome = run_trial(small_task(**changes), FP32, SHORT)
        assert outcome.kind == "user_error"
        assert re.search(message, outcome.message), outcome.message

    def test_a_metric_that_is_nan_only_in_low_precision_is_a_result(self) -> None:
        def metric(model: nn.Module, batch: Any) -> float:
            return math.nan if model(batch[0]).dtype != torch.float32 else 1.0

        outcome = run_trial(small_task(metric=metric), AUTOCAST, SHORT)
        assert outcome.is_ok  # the evaluation itself is in FP32
        nan = run_trial(small_task(metric=lambda m, b: math.nan), AUTOCAST, SHORT)
        assert nan.kind == "non_finite_loss"
        json.dumps(nan.model_dump(mode="json"), allow_nan=False)

    def test_fp32_divergence_is_a_result_without_nan(self) -> None:
        def loss(model: nn.Module, batch: Any) -> torch.Tensor:
            return cross_entropy(model, batch) * math.inf

        outcome = run_trial(small_task(loss=loss), FP32, SHORT)
        assert outcome.kind == "non_finite_loss"
        assert outcome.train_losses == []
        json.dumps(outcome.model_dump(mode="json"), allow_nan=False)
