"""What a trial changes in its process is as before after it."""

from __future__ import annotations

import os
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

from autoprec.trials import health, isolation
from autoprec.trials.health import Health
from autoprec.trials.isolation import isolated, models_left, release


def test_switches_folder_and_environment_come_back(tmp_path: Path) -> None:
    read = [read for read, _ in isolation._SWITCHES]
    before = [each() for each in read]
    with isolated():
        torch.set_default_dtype(torch.float64)
        torch.set_default_device("meta")
        torch.set_grad_enabled(False)
        torch.set_autocast_enabled("cpu", True)
        torch.set_autocast_dtype("cpu", torch.float16)
        torch.set_autocast_dtype("cuda", torch.bfloat16)
        torch.set_autocast_cache_enabled(False)
        torch.backends.cudnn.benchmark = not torch.backends.cudnn.benchmark
        torch.backends.cuda.enable_flash_sdp(False)
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        os.chdir(tmp_path)
        os.environ["OF_A_TRIAL"] = "1"
        assert sum(each() != value for each, value in zip(read, before, strict=True)) >= 11
    assert [each() for each in read] == before
    assert torch.zeros(1).device.type == "cpu"


def test_random_states_come_back() -> None:
    with isolated():
        expected = torch.rand(3)
    with isolated():
        torch.manual_seed(7)
    assert torch.equal(torch.rand(3), expected)


def test_a_model_that_somebody_keeps_is_counted_until_it_is_gone() -> None:
    model = nn.Linear(2, 2)
    release(weakref.ref(model), torch.device("cpu"))
    assert models_left() == 1
    assert Health().look("cpu") == "the task kept the model of a trial alive"
    del model
    assert models_left() == 0
    assert Health().look("cpu") == ""


def test_memory_that_does_not_come_back_makes_a_process_unfit(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = iter([100 * 2**20, 1000 * 2**20, 1300 * 2**20])
    monkeypatch.setattr(health, "resident_bytes", lambda: next(sizes))
    look = Health().look
    assert [look("cpu"), look("cpu"), look("cpu")] == ["", "", "1,200 MiB of memory did not come back"]
