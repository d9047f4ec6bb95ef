"""The worker process: what hangs, crashes or prints in it is a result here, and the next trial is as if alone."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path

import pytest
import torch
from small_tasks import build, comparable

from autoprec.errors import StudyError, TaskError
from autoprec.policy import Policy
from autoprec.tasks import TaskSource
from autoprec.tasks.code import code_digest
from autoprec.trials import InlineWorker, TrialSettings, Worker, child

FP32 = Policy(default="fp32")
BF16 = Policy(default="autocast", dtype="bf16")
SHORT = TrialSettings(warmup_steps=1, measured_steps=2, batchnorm_batches=1)
FILE = Path(__file__).with_name("small_tasks.py")


def source(fault: str = "none", *, function: str = "build") -> TaskSource:
    arguments = {"fault": fault} if function == "build" else {}
    return TaskSource("function", {"name": f"{FILE}:{function}", "arguments": arguments})


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return True


def ends_within(pid: int, *, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not is_running(pid)


@pytest.fixture(scope="module")
def healthy() -> Iterator[Worker]:
    with Worker(source(), num_threads=1) as worker:
        yield worker


def test_a_trial_in_the_worker_equals_one_in_this_process(healthy: Worker) -> None:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in the worker: sums depend on how they are split
    try:
        here = comparable(InlineWorker(build()).run(FP32, SHORT))
    finally:
        torch.set_num_threads(num_threads)
    assert comparable(healthy.run(FP32, SHORT)) == here


def test_a_function_is_called_with_the_task_in_the_worker_as_here(healthy: Worker) -> None:
    for runner in (healthy, InlineWorker(build())):
        assert runner.call(f"{FILE}:describe_task", {"size": 3}) == {"name": "faulty-none", "size": 3}
        with pytest.raises(TaskError, match="ValueError: as asked"):
            runner.call(f"{FILE}:describe_task", {"fails": True})
    assert healthy.run(FP32, SHORT).is_ok


def test_the_process_is_kept_between_trials(healthy: Worker) -> None:
    healthy.run(FP32, SHORT)
    pid = healthy.pid
    healthy.run(BF16, SHORT)
    assert healthy.pid == pid is not None


@pytest.mark.parametrize(
    ("fault", "kind", "message"),
    [
        ("hang", "timeout", "no result within 2 s"),
        ("hang with the lock", "timeout", "no result within 2 s"),
        ("abort", "crashed", "signal SIGABRT"),
        ("segfault", "crashed", "signal SIGSEGV"),
        ("exit", "crashed", "exit code 3"),
    ],
)
def test_a_process_that_hangs_or_dies_is_replaced(healthy: Worker, fault: str, kind: str, message: str) -> None:
    expected = comparable(healthy.run(FP32, SHORT))
    with Worker(source(fault), num_threads=1) as worker:
        worker.start()
        pid = worker.pid
        assert pid is not None
        started = time.monotonic()
        outcome = worker.run(BF16, SHORT, timeout_seconds=2.0 if kind == "timeout" else 60.0)
        seconds = time.monotonic() - started
        assert outcome.kind == kind
        assert message in outcome.message
        assert str(FILE.parent) not in outcome.stderr_tail
        if kind == "timeout":
            assert seconds < 4.0  # the time limit and two seconds
            assert "small_tasks.py" in outcome.stderr_tail  # where it hung
        if fault == "abort":
            assert "about to abort" in outcome.stderr_tail
        assert not is_running(pid)
        assert comparable(worker.run(FP32, SHORT)) == expected


@pytest.mark.parametrize("who", ["the process", "the fork server"])
def test_what_somebody_else_ended_is_run_once_more(who: str) -> None:
    with Worker(source("always:slow"), num_threads=1) as worker:
        expected = comparable(worker.run(FP32, SHORT))
        pid = worker.pid
        assert pid is not None
        victim = (
            pid if who == "the process" else int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        )
        threading.Timer(0.1, os.kill, (victim, signal.SIGKILL)).start()
        assert comparable(worker.run(FP32, SHORT)) == expected
        assert worker.pid not in (None, pid)


def test_a_process_that_somebody_else_ends_while_it_builds_the_task_is_started_anew(tmp_path: Path) -> None:
    arguments = {"path": str(tmp_path / "kills"), "num_kills": 2}
    builds = TaskSource("function", {"name": f"{FILE}:build_after_kills", "arguments": arguments})
    with Worker(builds, num_threads=1) as worker:
        assert worker.run(FP32, SHORT).is_ok


def test_what_is_killed_each_time_has_crashed() -> None:
    with Worker(source("kill"), num_threads=1) as worker:
        outcome = worker.run(BF16, SHORT)
        assert (outcome.kind, outcome.message) == ("crashed", "the process ended: signal SIGKILL")
        assert worker.run(FP32, SHORT).is_ok


def test_a_kill_by_the_system_for_want_of_memory_is_out_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = itertools.count()
    monkeypatch.setattr(child, "_count_out_of_memory", lambda: next(counts))
    with Worker(source("kill"), num_threads=1) as worker:
        outcome = worker.run(BF16, SHORT)
    assert outcome.kind == "out_of_memory"
    assert "the system was out of memory" in outcome.message


@pytest.mark.parametrize("how", ["ends", "is killed"])
def test_what_a_trial_started_ends_with_its_process(how: str, tmp_path: Path) -> None:
    number = tmp_path / "number"
    with Worker(source(f"child:{number}"), num_threads=1) as worker:
        assert worker.run(BF16, SHORT).is_ok
        started, pid = int(number.read_text()), worker.pid
        assert is_running(started)
        assert pid is not None
        if how == "is killed":
            os.kill(pid, signal.SIGKILL)
        else:
            worker.close()
        assert ends_within(started, seconds=5)


def test_a_process_whose_trials_stay_alive_is_replaced() -> None:
    with Worker(source("always:keep"), num_threads=1) as worker:
        worker.start()
        pid = worker.pid
        outcome = worker.run(FP32, SHORT)
        assert outcome.is_ok
        assert outcome.notes[-1].endswith("the task kept the model of a trial alive")
        assert pid is not None
        assert ends_within(pid, seconds=5)


def test_a_task_whose_code_changes_meanwhile_is_not_mixed(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(FILE.read_text())
    task = TaskSource("function", {"name": f"{file}:build", "arguments": {}}).build()
    assert task.source is not None
    with Worker(task.source, num_threads=1, code=code_digest(task)) as worker:
        assert worker.run(FP32, SHORT).is_ok
        file.write_text(FILE.read_text() + "\nCHANGED = True\n")
        assert worker.run(FP32, SHORT).is_ok  # it is in memory as it was
        assert worker.pid is not None
        os.kill(worker.pid, signal.SIGKILL)
        with pytest.raises(StudyError, match="the code of the task has changed while its trials ran"):
            worker.run(FP32, SHORT)


def test_an_exception_that_cannot_be_pickled_is_a_result() -> None:
    with Worker(source("always:unpicklable"), num_threads=1) as worker:
        outcome = worker.run(FP32, SHORT)
        assert outcome.kind == "user_error"
        assert outcome.message.startswith("_Unpicklable: a lambda inside")
        assert worker.pid is not None


def test_a_task_that_cannot_be_built_is_the_tasks_own_error(capfd: pytest.CaptureFixture[str]) -> None:
    with (
        Worker(source(function="build_nothing"), num_threads=1) as worker,
        pytest.raises(TaskError, match=r"small_tasks\.py:build_nothing returned NoneType"),
    ):
        worker.start()
    assert capfd.readouterr() == ("", "")


def test_an_exception_in_a_builder_comes_with_its_traceback(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("def make():\n    return {}['missing']\n")
    with (
        Worker(TaskSource("function", {"name": f"{tmp_path}/broken.py:make"})) as worker,
        pytest.raises(TaskError, match=r"(?s)KeyError: 'missing'.*broken\.py.*return \{\}\['missing'\]"),
    ):
        worker.start()


def test_closing_ends_the_process() -> None:
    worker = Worker(source(), num_threads=1)
    worker.start()
    pid = worker.pid
    assert pid is not None
    worker.close()
    assert worker.pid is None
    assert ends_within(pid, seconds=5)
    worker.close()


def test_a_trial_interrupted_here_ends_the_process() -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with Worker(source("always:hang"), num_threads=1) as worker:
        worker.start()
        pid = worker.pid
        assert pid is not None
        before = signal.signal(signal.SIGALRM, interrupt)
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.5)
            with pytest.raises(KeyboardInterrupt):
                worker.run(FP32, SHORT)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        assert ends_within(pid, seconds=5)


SCRIPT = """
import sys, time
from autoprec.tasks import TaskSource
from autoprec.trials import Worker
print("the script runs", flush=True)
worker = Worker(TaskSource("function", {{"name": {name!r}}}), num_threads=1)
worker.start()
print(worker.pid, flush=True)
{ending}
"""


@pytest.mark.parametrize("ending", ["time.sleep(600)", "sys.exit(0)"], ids=["killed", "exits"])
def test_the_process_dies_with_its_parent_and_does_not_run_the_parents_script(tmp_path: Path, ending: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT.format(name=f"{FILE}:build", ending=ending)))
    parent = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    with parent.stdout:
        assert parent.stdout.readline() == "the script runs\n"
        pid = int(parent.stdout.readline())
        if "sleep" in ending:
            assert is_running(pid)
            parent.kill()
        assert parent.wait(30) == (-signal.SIGKILL if "sleep" in ending else 0)
        assert ends_within(pid, seconds=5)
        assert parent.stdout.read() == ""


IN_A_TRIAL = """
import sys, threading, time
from autoprec.policy import Policy
from autoprec.tasks import TaskSource
from autoprec.trials import TrialSettings, Worker
worker = Worker(TaskSource("function", {{"name": {name!r}, "arguments": {{"fault": "always:hang"}}}}), num_threads=1)
worker.start()
threading.Thread(target=worker.run, args=(Policy(default="fp32"), TrialSettings()), daemon=True).start()
time.sleep(1)
print(worker.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM], ids=["SIGKILL", "SIGTERM"])
def test_the_process_dies_with_its_parent_in_the_middle_of_a_trial(tmp_path: Path, how: signal.Signals) -> None:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(IN_A_TRIAL.format(name=f"{FILE}:build")))
    parent = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    with parent.stdout:
        pid = int(parent.stdout.readline())
        assert is_running(pid)
        parent.send_signal(how)
        assert parent.wait(30) == -how
        assert ends_within(pid, seconds=5)


SLOW_TO_LOAD = """
import importlib, os, time
load_at_once = importlib.import_module
def load(name, package=None):
    if not name.startswith("autoprec."):
        return load_at_once(name, package)
    with open({file!r}, "w") as file:
        file.write(str(os.getpid()))
    time.sleep(600)
importlib.import_module = load
"""
WHILE_LOADING = """
import multiprocessing, time
context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["slow_to_load", "autoprec.trials.preload"])
from multiprocessing.forkserver import ensure_running
ensure_running()
time.sleep(600)
"""


def test_the_fork_server_dies_with_its_parent_while_it_loads(tmp_path: Path) -> None:
    (tmp_path / "slow_to_load.py").write_text(SLOW_TO_LOAD.format(file=str(tmp_path / "pid")))
    script = tmp_path / "script.py"
    script.write_text(WHILE_LOADING)
    places = os.pathsep.join([str(tmp_path), *sys.path])
    with subprocess.Popen([sys.executable, str(script)], env={**os.environ, "PYTHONPATH": places}) as parent:
        try:
            server = first_number_in(tmp_path / "pid", seconds=30)
            assert is_running(server)
        finally:
            parent.kill()
    assert ends_within(server, seconds=5)


def first_number_in(file: Path, *, seconds: float) -> int:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if file.exists() and file.read_text():
            return int(file.read_text())
        time.sleep(0.05)
    raise AssertionError(f"{file.name} was not written within {seconds:g} s")


LOADER_TASK = """
import multiprocessing

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import autoprec


class Numbers(Dataset):
    def __init__(self, transform):
        self.transform = transform

    def __len__(self):
        return 32

    def __getitem__(self, index):
        return self.transform(torch.full((4,), index / 32))


def task():
    loader = DataLoader(Numbers(lambda x: x * 1.0), batch_size=8, num_workers=1)
    return autoprec.Task(
        name=multiprocessing.get_start_method(), model=lambda: nn.Linear(4, 1), train_batches=loader,
        eval_batches=loader, loss=lambda model, batch: (model(batch) - batch.sum(1, keepdim=True)).square().mean(),
    )


def start_method(task):
    return task.name
"""


def test_a_loader_in_a_trial_starts_its_workers_as_the_platform_does(tmp_path: Path) -> None:
    file = tmp_path / "loading.py"
    file.write_text(LOADER_TASK)
    expected = subprocess.run(
        [sys.executable, "-c", "import multiprocessing; print(multiprocessing.get_start_method())"],
        capture_output=True, text=True, check=True,
    ).stdout.strip()  # fmt: skip
    with Worker(TaskSource("function", {"name": f"{file}:task"}), num_threads=1) as worker:
        assert worker.call(f"{file}:start_method", {}) == expected
        outcome = worker.run(FP32, SHORT, timeout_seconds=60)
    assert outcome.is_ok, outcome.message  # a forkserver's worker cannot pickle the lambda


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="Linux alone tells")
def test_a_program_in_a_session_of_its_own_ends_with_its_worker(tmp_path: Path) -> None:
    with Worker(source(f"always:session:{tmp_path / 'pid'}"), num_threads=1) as worker:
        assert worker.run(FP32, SHORT, timeout_seconds=60).is_ok
        pid = int((tmp_path / "pid").read_text())
        assert is_running(pid)
    assert ends_within(pid, seconds=20)


@pytest.mark.slow
def test_a_fork_server_that_was_stopped_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    with Worker(source(), num_threads=1) as worker:
        worker.start()
        stopped = forkserver._forkserver._forkserver_pid
        os.kill(stopped, signal.SIGSTOP)
        assert worker.pid is not None
        os.kill(worker.pid, signal.SIGKILL)
        end = child._end_fork_server

        def end_once() -> None:
            monkeypatch.setattr(child, "ANSWER_SECONDS", 120.0)  # the next one has to load
            end()

        monkeypatch.setattr(child, "_end_fork_server", end_once)
        monkeypatch.setattr(child, "ANSWER_SECONDS", 2.0)
        assert worker.run(FP32, SHORT, timeout_seconds=120).is_ok
    assert ends_within(stopped, seconds=10)
