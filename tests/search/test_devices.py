"""Several devices: alike, each given once, and one trial at a time on each."""

from __future__ import annotations

import threading
import time
from collections import Counter
from typing import Any, ClassVar

import pytest
import torch
from toys import tiny_plan, tiny_task

from autoprec.errors import UsageError
from autoprec.policy import Policy
from autoprec.search.plan import resolve_devices
from autoprec.trials import Outcome, TrialSettings, WorkerPool, pool


@pytest.fixture
def three_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda name: "V100" if name == "cuda:2" else "A100")


@pytest.mark.usefixtures("three_gpus")
def test_devices_of_one_product_are_taken() -> None:
    assert resolve_devices("cuda:0, cuda:1") == ["cuda:0", "cuda:1"]
    assert resolve_devices("cuda,cuda:1") == ["cuda:0", "cuda:1"]
    assert resolve_devices("cuda:1") == ["cuda:1"]


@pytest.mark.usefixtures("three_gpus")
@pytest.mark.parametrize(
    ("names", "words"),
    [
        ("cuda:0,cuda:0", "one is given twice"),
        ("cuda,cuda:0", "one is given twice"),
        ("cuda:0,cuda:2", "A100, V100; times of one study need one product"),
        ("cuda:0,cuda:3", "torch sees 3 CUDA devices"),
        ("cpu,cpu", "on a CPU --workers"),
        ("cuda:0,cpu", "several are for CUDA"),
        (",", "none is given"),
    ],
)
def test_devices_that_would_disturb_or_not_compare_are_refused(names: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        resolve_devices(names)


class Recorder:
    """Stands for a worker process: notes the device of each trial, and how many run on it at once."""

    running: ClassVar[Counter[str]] = Counter()
    most: ClassVar[Counter[str]] = Counter()

    def __init__(self) -> None:
        self.devices: set[str] = set()

    def run(self, policy: Policy, settings: TrialSettings, *, timeout_seconds: float | None = None) -> Outcome:
        self.devices.add(settings.device)
        Recorder.running[settings.device] += 1
        Recorder.most[settings.device] = max(Recorder.most[settings.device], Recorder.running[settings.device])
        time.sleep(0.01)
        Recorder.running[settings.device] -= 1
        return Outcome(kind="ok")

    def close(self) -> None:
        """Nothing is held."""


def test_each_worker_has_a_device_and_no_two_trials_run_on_one(monkeypatch: pytest.MonkeyPatch) -> None:
    workers: list[Any] = [Recorder(), Recorder()]
    opened = iter(workers)
    monkeypatch.setattr(pool, "_open", lambda task, threads: next(opened))
    with WorkerPool(tiny_task(), num_workers=2, devices=("cuda:0", "cuda:1")) as started:
        threads = [
            threading.Thread(target=started.run, args=(Policy(), TrialSettings(device="cuda:0"))) for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    assert [worker.devices for worker in workers] == [{"cuda:0"}, {"cuda:1"}]
    assert Recorder.most == {"cuda:0": 1, "cuda:1": 1}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"devices": ("cuda:0", "cuda:1")}, "the trials' device, 'cpu', is not the first"),
        ({"devices": ("cpu", "cuda:1"), "num_workers": 3}, "with devices it is their number"),
        ({"devices": ("cpu", "cuda:1")}, "this task cannot travel"),
    ],
)
def test_what_does_not_go_with_devices_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        tiny_plan(**settings)
