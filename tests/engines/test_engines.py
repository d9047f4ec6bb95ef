"""Searches on real engines: Ray with two GPUs that it only believes in, submitit's own executor."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from searches import TASK, TOTAL, Start, check_ended, finished, parent_of, record, wait_for_trials, workers

from autoprec import load_policy


@pytest.fixture(scope="module")
def ray_address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A cluster of this machine's own that believes in two GPUs."""
    pytest.importorskip("ray", reason="needs Ray: pip install 'autoprec[ray]'")
    port = 20000 + os.getpid() % 20000
    ray = [sys.executable, "-m", "ray.scripts.scripts"]
    has = ["--num-cpus=4", "--num-gpus=2", "--include-dashboard=false", "--disable-usage-stats"]
    with subprocess.Popen(
        [*ray, "start", "--head", "--block", f"--port={port}", "--node-ip-address=127.0.0.1", *has],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as head:
        try:
            yield f"127.0.0.1:{port}"
        finally:
            head.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                head.wait(30)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(head.pid, signal.SIGKILL)


@pytest.mark.xdist_group("ray")  # one cluster for all of them
def test_ray_runs_two_trials_at_a_time_each_on_its_own_device(start: Start, ray_address: str, tmp_path: Path) -> None:
    search = start(tmp_path, f"ray:{ray_address}")
    wait_for_trials(search, tmp_path, count=4)
    assert len(workers(tmp_path)) == 2
    check_ended(search, tmp_path)
    seen = {process: devices for devices, process in record(tmp_path)}
    holders = {trial.user_attrs["holder"]["process"] for trial in finished(tmp_path)}
    assert len(holders) == 2
    assert {"0", "1"} <= set(seen.values())
    assert len(set(record(tmp_path))) == len(seen)  # no process saw another device than its own


@pytest.mark.xdist_group("ray")
@pytest.mark.parametrize("which", ["worker", "ray's process"])
def test_ray_runs_the_trial_of_a_killed_worker_again(
    start: Start, which: str, ray_address: str, tmp_path: Path
) -> None:
    search = start(tmp_path, f"ray:{ray_address}")
    wait_for_trials(search, tmp_path, count=4)
    victim = workers(tmp_path)[0]
    os.kill(victim if which == "worker" else parent_of(victim), signal.SIGKILL)
    check_ended(search, tmp_path)


@pytest.mark.parametrize("which", ["worker", "job"])
def test_submitit_runs_the_trial_of_a_killed_worker_again(start: Start, which: str, tmp_path: Path) -> None:
    pytest.importorskip("submitit", reason="needs submitit: pip install 'autoprec[slurm]'")
    search = start(tmp_path, "slurm:local", "--workers", "2", "--device", "cpu")
    wait_for_trials(search, tmp_path, count=4)
    victim = workers(tmp_path)[0]
    os.kill(victim if which == "worker" else parent_of(victim), signal.SIGKILL)
    check_ended(search, tmp_path)
    assert list((tmp_path / "run" / "jobs").glob("*.out"))


def test_an_error_of_the_users_ends_all_with_its_message_and_is_not_tried_again(start: Start, tmp_path: Path) -> None:
    pytest.importorskip("submitit", reason="needs submitit: pip install 'autoprec[slurm]'")
    search = start(tmp_path, "slurm:local", "--workers", "2", task=TASK.replace(":task", ":broken"))
    stdout, stderr = search.communicate(timeout=120)
    assert search.returncode == 1
    assert "no worker is left, and" in stderr
    assert "no data here" in stderr
    assert stdout.count("a worker ended with exit code 2") == 2


def test_an_interrupted_search_takes_its_jobs_along(start: Start, tmp_path: Path) -> None:
    pytest.importorskip("submitit", reason="needs submitit: pip install 'autoprec[slurm]'")
    search = start(tmp_path, "slurm:local", "--workers", "2", "--device", "cpu")
    wait_for_trials(search, tmp_path, count=2)
    search.send_signal(signal.SIGINT)
    _, stderr = search.communicate(timeout=30)
    assert search.returncode == 130
    assert "the same command goes on where it stopped" in stderr
    deadline = time.monotonic() + 10
    while workers(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert workers(tmp_path) == []
    check_ended(start(tmp_path, "slurm:local", "--workers", "1", "--device", "cpu"), tmp_path)


def test_a_search_whose_time_is_over_is_proved_with_what_there_is(start: Start, tmp_path: Path) -> None:
    pytest.importorskip("submitit", reason="needs submitit: pip install 'autoprec[slurm]'")
    search = start(tmp_path, "slurm:local", "--device", "cpu", "--timeout", "0.5", seconds=1.0)
    _, stderr = search.communicate(timeout=400)
    assert search.returncode in (0, 3), stderr
    assert load_policy(tmp_path / "run" / "policy.json").recommendation is not None
    assert 2 <= len(finished(tmp_path)) < TOTAL  # the baselines, FP32 and BF16 autocast, always run
