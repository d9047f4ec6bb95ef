"""What only a GPU shows of trials: memory, times, errors that stick to a process. C10, C40, C41, C42, C43, C44."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from small_tasks import small_task
from torch import nn

from autoprec.policy import Policy
from autoprec.search.plan import resolve_device, resolve_devices, target_of
from autoprec.tasks import TaskSource
from autoprec.tasks.protocol import TargetShape, Task
from autoprec.trials import Outcome, TrialSettings, Worker, run_trial
from autoprec.trials.isolation import isolated, seed_everything

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]

FP32 = Policy(default="fp32")
AUTOCAST = Policy(default="autocast", dtype="fp16")
SHORT = TrialSettings(device="cuda", warmup_steps=2, measured_steps=3, batchnorm_batches=1)
FILE = Path(__file__).with_name("small_tasks.py")


def wide_task(width: int, size: int) -> Task:
    def network() -> nn.Module:
        return nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 2))

    def batch() -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(size, 4), torch.zeros(size, dtype=torch.long)

    return small_task(model=network, target=TargetShape(make_batch=batch, batch_size=size))


def peak(outcome: Outcome) -> float:
    assert outcome.peak_memory_bytes is not None, outcome.message
    return outcome.peak_memory_bytes.value


def test_peak_memory_does_not_depend_on_the_place_of_a_trial() -> None:
    """C41: the same FP32 policy as trial 0, 3 and 9."""
    task = wide_task(1024, 4096)
    policies = [FP32 if number in (0, 3, 9) else AUTOCAST for number in range(10)]
    outcomes = [run_trial(task, policy, SHORT) for policy in policies]
    first, *others = (peak(outcomes[number]) for number in (0, 3, 9))
    assert others == pytest.approx([first, first], rel=0.01)
    assert outcomes[0].peak_memory_bytes is not None
    assert outcomes[0].peak_memory_bytes.kind == "measured"


def test_memory_is_back_after_each_trial() -> None:
    """C40 and C44: nothing of a trial stays on the device, also of one that did not fit."""
    task = wide_task(256, 256)
    run_trial(task, FP32, SHORT)
    base = torch.cuda.memory_allocated()
    run_trial(task, AUTOCAST, SHORT)
    assert torch.cuda.memory_allocated() == base
    too_large = wide_task(16, 2**33)
    assert run_trial(too_large, FP32, SHORT).kind == "out_of_memory"
    assert torch.cuda.memory_allocated() == base


def test_weights_without_activations_need_more_memory_under_autocast_and_the_figures_say_so() -> None:
    """C40: masters beside half copies."""
    task = wide_task(8192, 4)
    assert peak(run_trial(task, AUTOCAST, SHORT)) > 0.99 * peak(run_trial(task, FP32, SHORT))


def test_an_error_that_sticks_to_the_process_replaces_it() -> None:
    """C44: a device-side assert; the next trial equals one alone."""
    source = TaskSource("function", {"name": f"{FILE}:build", "arguments": {"fault": "device assert"}})
    with Worker(source) as worker:
        expected = worker.run(FP32, SHORT).train_losses
        pid = worker.pid
        outcome = worker.run(Policy(default="autocast", dtype="bf16"), SHORT, timeout_seconds=120)
        assert outcome.kind == "crashed"
        assert worker.run(FP32, SHORT).train_losses == expected
        assert worker.pid != pid


def test_throughput_is_measured_and_a_slower_policy_is_said_to_be_slower() -> None:
    """C42: a narrow network, where casts cost more than they save."""
    task = wide_task(16, 64)
    slow, fast = (run_trial(task, policy, SHORT).throughput_samples_per_second for policy in (AUTOCAST, FP32))
    assert slow is not None
    assert fast is not None
    assert slow.kind == fast.kind == "measured"
    assert slow.value < 1.2 * fast.value


def test_a_half_fft_of_another_size_is_unsupported_and_not_an_error_of_the_search() -> None:
    """C10: cuFFT in half takes powers of two alone."""

    class Spectrum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside = nn.Linear(4, 192)
            self.head = nn.Linear(97, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(torch.fft.rfft(self.inside(x)).abs())

    task = small_task(model=Spectrum)
    assert run_trial(task, Policy(default="fp16"), SHORT).kind == "unsupported"
    assert run_trial(task, FP32, SHORT).is_ok


def test_random_states_of_the_devices_are_given_back() -> None:
    torch.cuda.init()
    seed_everything(3)
    expected = torch.rand(2, device="cuda")
    seed_everything(3)
    with isolated():
        seed_everything(4)
        torch.rand(5, device="cuda")
    assert torch.equal(torch.rand(2, device="cuda"), expected)


def test_the_device_here_is_the_target_and_is_taken_by_itself() -> None:
    assert resolve_device(None) == "cuda"
    assert target_of(SHORT) == (torch.cuda.get_device_name(), True)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are not two CUDA devices")
def test_two_devices_of_one_product_are_taken() -> None:
    assert resolve_devices("cuda:0,cuda:1") == ["cuda:0", "cuda:1"]
