"""A trial: the same as a plain loop where nothing is special, a result with its kind where something is."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from small_tasks import batches, comparable, cross_entropy, network, small_task
from torch import nn

from autoprec.policy import GradScalerSettings, OptimizerSettings, Policy
from autoprec.tasks import TargetShape, vision_task
from autoprec.trials import Outcome, TrialSettings, run_trial, target

FP32 = Policy(default="fp32")
AUTOCAST = Policy(default="autocast", dtype="fp16")
HALF = Policy(default="fp16")
BF16 = Policy(default="autocast", dtype="bf16")
SHORT = TrialSettings(warmup_steps=2, measured_steps=5, batchnorm_batches=3)


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

    def test_the_start_weights_are_evaluated_on_demand_and_the_run_stays_what_it_is(self) -> None:
        plain = run_trial(small_task(), FP32, SHORT)
        found = run_trial(small_task(), FP32, SHORT.model_copy(update={"measure_start": True}))
        assert comparable(found.model_copy(update={"start_accuracy": None, "start_eval_loss": None})) == comparable(
            plain
        )
        torch.manual_seed(0)
        model = network()
        model[1].momentum = None  # the plain mean over the batches that estimate the statistics
        with torch.no_grad():
            for batch in batches(0)[: SHORT.batchnorm_batches]:
                model(batch[0])
            model.eval()
            losses = [cross_entropy(model, batch).item() for batch in batches(1)]
        assert found.start_eval_loss is not None
        assert found.start_eval_loss.value == pytest.approx(sum(losses) / len(losses), rel=1e-6)
        assert plain.start_eval_loss is None

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
