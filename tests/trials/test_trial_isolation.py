"""A trial changes nothing outside it, and nothing outside changes a trial."""

from __future__ import annotations

import gc
import random
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from small_tasks import comparable, cross_entropy, network, small_task
from torch import nn

from autoprec.policy import Policy
from autoprec.trials import TrialSettings, run_trial

FP32 = Policy(default="fp32")
AUTOCAST = Policy(default="autocast", dtype="fp16")
HALF = Policy(default="fp16")
BF16 = Policy(default="autocast", dtype="bf16")
SHORT = TrialSettings(warmup_steps=2, measured_steps=5, batchnorm_batches=3)


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
