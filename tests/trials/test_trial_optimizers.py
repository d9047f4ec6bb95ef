"""A trial with several optimizers: losses of their own, in turn, each with its own numbers."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from small_tasks import Adversaries, batches, critic_loss, cross_entropy, gan_task, maker_loss, network, small_task
from torch import nn

from autoprec.errors import TaskError
from autoprec.policy import Policy
from autoprec.trials import TrialSettings, run_trial
from autoprec.trials.building import build_task_optimizers
from autoprec.trials.checking import check_task

FP32 = Policy(default="fp32")
AUTOCAST = Policy(default="autocast", dtype="fp16")
HALF = Policy(default="fp16")
BF16 = Policy(default="autocast", dtype="bf16")
SHORT = TrialSettings(warmup_steps=2, measured_steps=5, batchnorm_batches=3)


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


def by_decay(model: nn.Module) -> torch.optim.Optimizer:
    """Weight-decay groups by name, as minGPT and nanoGPT build them."""
    decayed = [p for name, p in model.named_parameters() if name.endswith("weight")]
    rest = [p for name, p in model.named_parameters() if not name.endswith("weight")]
    return torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}], lr=1e-2)


def annotated(it: nn.Sequential, lr: float = 1e-2) -> torch.optim.Optimizer:
    """A rate for each layer, as timm's layer decay has it."""
    groups = [{"params": list(part.parameters()), "lr": lr * 0.5**depth} for depth, part in enumerate(it)]
    return torch.optim.SGD([group for group in groups if group["params"]], lr=lr)


def of_parameters(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    assert isinstance(parameters, list)
    return torch.optim.SGD(parameters, lr=1e-2)


class TestOptimizersFromTheModel:
    @pytest.mark.parametrize(
        "build", [by_decay, annotated, lambda model: by_decay(model)], ids=["name", "type", "lambda"]
    )
    def test_a_function_that_names_the_model_gets_it(self, build: Any) -> None:
        assert check_task(small_task(optimizer=build), SHORT, num_steps=4) == []
        groups = build_task_optimizers(small_task(optimizer=build), FP32, network())[0].param_groups
        assert len(groups) > 1
        outcome = run_trial(small_task(optimizer=build), AUTOCAST, SHORT)
        assert outcome.is_ok, outcome.message

    def test_the_weights_of_a_group_decay_and_the_others_do_not(self) -> None:
        model = network()
        weights, rest = build_task_optimizers(small_task(optimizer=by_decay), FP32, model)[0].param_groups
        names = {id(p): name for name, p in model.named_parameters()}
        assert {names[id(p)].rpartition(".")[2] for p in weights["params"]} == {"weight"}
        assert {names[id(p)].rpartition(".")[2] for p in rest["params"]} == {"bias"}

    @pytest.mark.parametrize("build", [of_parameters, lambda parameters: of_parameters(parameters), torch.optim.SGD])
    def test_a_function_from_parameters_and_a_class_get_parameters(self, build: Any) -> None:
        assert run_trial(small_task(optimizer=build, optimizer_settings={"lr": 1e-2}), FP32, SHORT).is_ok

    def test_with_losses_of_their_own_each_gets_its_submodule(self) -> None:
        seen: list[type] = []

        def build(model: nn.Module) -> torch.optim.Optimizer:
            seen.append(type(model))
            return torch.optim.SGD(model.parameters(), lr=1e-3)

        build_task_optimizers(gan_task(optimizer=build, optimizer_settings={}), FP32, Adversaries())
        assert seen == [type(Adversaries().critic), type(Adversaries().maker)]
