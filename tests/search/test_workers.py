"""Many processes on one study: nothing runs twice, nothing is lost with a process, and all end by themselves."""

from __future__ import annotations

import json
import os
import random
import select
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from subprocess import PIPE
from typing import Any

import optuna
import pytest
from optuna.trial import TrialState
from postgres_server import find_programs, postgres_server
from toys import Chain, FakeMeasure, tiny_plan, tiny_task

from autoprec.errors import StudyError, TaskError, UsageError
from autoprec.policy import Number, Policy
from autoprec.search import network_folders, presence
from autoprec.search.anchors import ANCHOR_EVERY
from autoprec.search.events import Events
from autoprec.search.pipeline import open_search, present, run_search
from autoprec.search.profiling import learn
from autoprec.search.runner import _Runner
from autoprec.search.storage import open_storage, opened
from autoprec.search.workers import run_worker
from autoprec.trials.outcome import Outcome, TrialSettings

SCRIPT = Path(__file__).with_name("worker_processes.py")


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    pytest.importorskip("psycopg", reason="needs psycopg: pip install 'autoprec[postgresql]'")
    programs = find_programs()
    if programs is None:
        pytest.skip("needs a PostgreSQL server: initdb and postgres")
    with postgres_server(programs) as url:
        yield url


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A database that is empty."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'study.db'}"
    from sqlalchemy import create_engine, text

    server: str = request.getfixturevalue("server")
    name = f"study{random.getrandbits(48):x}"
    engine = create_engine(server.replace("postgresql:", "postgresql+psycopg:"), isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.execute(text(f"CREATE DATABASE {name}"))
    engine.dispose()
    return server.rpartition("/")[0] + f"/{name}"


class Workers:
    """Worker processes on one study: their numbers, and what they ended with."""

    def __init__(self, starter: subprocess.Popen[bytes], folder: Path) -> None:
        assert starter.stdout is not None
        self._lines, self._folder = starter.stdout, folder
        self.numbers: list[int] = self._read()
        self._ended: dict[int, int] | None = None

    def _read(self) -> Any:
        return json.loads(self._lines.readline() or b"null")

    def some_are_there(self) -> bool:
        return self._ended is None and not select.select([self._lines], [], [], 0)[0]

    def end(self) -> dict[int, int]:
        """Wait for all; return number -> exit code."""
        if self._ended is None:
            self._ended = {int(number): code for number, code in self._read().items()}
        return self._ended

    def told(self) -> str:
        path = self._folder / "told.txt"
        return path.read_text() if path.exists() else ""


@pytest.fixture(scope="module")
def starter() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, str(SCRIPT)], stdin=PIPE, stdout=PIPE, bufsize=0) as process:
        yield process
        process.kill()


Start = Callable[..., AbstractContextManager[Workers]]


@pytest.fixture
def workers(starter: subprocess.Popen[bytes]) -> Start:
    """Starts worker processes on a study, which end with its `with`."""

    @contextmanager
    def start(url: str, folder: Path, **settings: Any) -> Iterator[Workers]:
        assert starter.stdin is not None
        starter.stdin.write(json.dumps({"storage": url, "folder": str(folder), **settings}).encode() + b"\n")
        group = Workers(starter, folder)
        try:
            yield group
        finally:
            if group.some_are_there():
                for number in group.numbers:
                    with suppress(ProcessLookupError):
                        os.kill(number, signal.SIGKILL)
            group.end()

    return start


def begun(folder: Path) -> list[tuple[int, str]]:
    """Return (process, policy) of every trial that was begun, in order."""
    path = folder / "begun.txt"
    lines = path.read_text().splitlines() if path.exists() else []
    return [(int(number), policy) for number, _, policy in (line.partition(" ") for line in lines)]


def trials_of(url: str) -> list[optuna.trial.FrozenTrial]:
    with opened(url) as storage:
        return optuna.load_study(study_name="shared", storage=storage).trials


def run_alone(trials: list[optuna.trial.FrozenTrial]) -> list[optuna.trial.FrozenTrial]:
    finished = [trial for trial in trials if trial.state in (TrialState.COMPLETE, TrialState.PRUNED)]
    return [trial for trial in finished if "cached_from" not in trial.user_attrs]


def test_workers_of_whom_two_are_killed_finish_the_total_and_run_nothing_twice(
    workers: Start, url: str, tmp_path: Path
) -> None:
    with workers(url, tmp_path, workers=8, n_trials=60, seconds=0.3) as group:
        killed: dict[int, str] = {}
        for number in random.Random(0).sample(group.numbers, 2):
            while number not in dict(begun(tmp_path)):
                assert group.some_are_there()
                time.sleep(0.02)
            time.sleep(random.uniform(0, 0.3))
            os.kill(number, signal.SIGKILL)
            killed[number] = dict(begun(tmp_path))[number]  # what it began last
        ended = group.end()
    assert ended == {number: -signal.SIGKILL if number in killed else 0 for number in group.numbers}, group.told()
    assert group.told() == ""
    trials = trials_of(url)
    assert len(run_alone(trials)) == 60
    assert not any(trial.state in (TrialState.RUNNING, TrialState.WAITING) for trial in trials)
    counts = Counter(policy for _, policy in begun(tmp_path))
    assert set(counts.values()) <= {1, 2}
    assert {policy for policy, count in counts.items() if count == 2} <= set(killed.values())
    keys = [trial.user_attrs["policy_key"] for trial in run_alone(trials)]
    twice = [key for key, count in Counter(keys).items() if count > 1]
    assert twice == [], [
        (t.number, t.state.name, t.user_attrs.get("arm"), t.datetime_start, t.datetime_complete)
        for t in trials
        if t.user_attrs["policy_key"] in twice
    ]
    assert sum(trial.state == TrialState.FAIL for trial in trials) <= 2
    assert len({number for number, _ in begun(tmp_path)}) == 8  # all took part


def test_other_arms_run_beside_the_first_fp32_and_are_told_after_it(workers: Start, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'study.db'}"
    with workers(url, tmp_path, workers=3, n_trials=4, seconds=1.0) as group:
        assert set(group.end().values()) == {0}, group.told()
    trials = run_alone(trials_of(url))
    reference = next(trial for trial in trials if trial.user_attrs["arm"] == "fp32")
    others = [trial for trial in trials if trial is not reference]
    assert reference.datetime_complete is not None
    assert sum(t.datetime_start < reference.datetime_complete for t in others if t.datetime_start) >= 2
    assert all(t.datetime_complete >= reference.datetime_complete for t in others if t.datetime_complete)
    assert all("loss_gap" in trial.constraints for trial in trials)


@pytest.mark.parametrize("sampler", ["tpe", "random"])
def test_optunas_own_samplers_work_with_many(workers: Start, sampler: str, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'study.db'}"
    with workers(url, tmp_path, workers=3, n_trials=16, seconds=0.05, sampler=sampler) as group:
        assert set(group.end().values()) == {0}, group.told()
    assert len(run_alone(trials_of(url))) == 16
    assert max(Counter(policy for _, policy in begun(tmp_path)).values()) == 1


def plan_on(url: str, folder: Path, **settings: Any) -> Any:
    task = tiny_task(model=Chain)
    return tiny_plan(folder, task=task, storage=url, study_name="shared", heartbeat_seconds=1, **settings)


def test_a_worker_goes_on_with_a_search_and_a_search_with_a_worker(url: str, tmp_path: Path) -> None:
    """The numbers are those of one process alone: cheap measurements do not depend on who runs them."""
    alone = run_search(
        tiny_plan(tmp_path / "alone", task=tiny_task(model=Chain), n_trials=12), FakeMeasure(noise=0.001)
    )
    with pytest.raises(KeyboardInterrupt):
        run_search(plan_on(url, tmp_path / "run", n_trials=12), FakeMeasure(noise=0.001, stop_at=4))
    measure = FakeMeasure(noise=0.001)
    assert run_worker(plan_on(url, tmp_path / "other"), measure, n_trials=9) == 9
    assert len(measure.order) == 6  # 3 were there
    assert not (tmp_path / "other").exists()  # a worker writes no file
    result = run_search(plan_on(url, tmp_path / "run", n_trials=12), FakeMeasure(noise=0.001))
    assert [(r.arm, r.key) for r in result.records if not r.is_cached] == [
        (r.arm, r.key) for r in alone.records if not r.is_cached
    ]
    assert result.choice.name == alone.choice.name
    assert (tmp_path / "run" / "policy.json").exists()


def test_a_worker_takes_the_total_that_the_search_has_said(url: str, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        run_search(plan_on(url, tmp_path, n_trials=7), FakeMeasure(noise=0.001, stop_at=3))
    assert run_worker(plan_on(url, tmp_path), FakeMeasure(noise=0.001)) == 7


def test_a_worker_without_a_study_says_how_one_is_begun(url: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no study 'shared' in the storage; .*--n-trials"):
        run_worker(plan_on(url, tmp_path), FakeMeasure())
    run_worker(plan_on(url, tmp_path), FakeMeasure(noise=0.001), n_trials=3)
    other = tiny_plan(tmp_path, storage=url, study_name="sharde")
    with pytest.raises(UsageError, match="nearest: shared"):
        run_worker(other, FakeMeasure())


def test_a_worker_of_another_task_is_refused_with_the_first_difference(url: str, tmp_path: Path) -> None:
    run_worker(plan_on(url, tmp_path), FakeMeasure(noise=0.001), n_trials=3)
    other = FakeMeasure()
    with pytest.raises(UsageError, match=r"trial\.seed was 0, now 1"):
        run_worker(plan_on(url, tmp_path, seed=1), other, n_trials=6)
    assert other.order == []


@pytest.mark.parametrize("driver", ["mysql", "MySQL+pymysql", "mariadb"])
def test_a_database_without_turns_is_refused(driver: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=rf"storage {driver.partition('+')[0].lower()}: .*workers cannot.*postgresql:"):
        run_worker(plan_on(f"{driver}://me@host/db", tmp_path), FakeMeasure(), n_trials=3)


def test_what_a_worker_ends_in_good_order_is_run_again_as_often_as_that(url: str, tmp_path: Path) -> None:
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            run_worker(plan_on(url, tmp_path), FakeMeasure(noise=0.001, stop_at=1), n_trials=4)
    measure = FakeMeasure(noise=0.001)
    assert run_worker(plan_on(url, tmp_path), measure, n_trials=4) == 4
    assert len(measure.order) == 4


def test_a_policy_that_ends_two_workers_is_told_as_crashed_and_not_tried_a_third_time(url: str, tmp_path: Path) -> None:
    deadly = "half everywhere"

    class Deadly(FakeMeasure):
        def __call__(self, policy: Policy, settings: TrialSettings) -> Outcome:
            if policy == arms[deadly]:
                os._exit(9)
            return super().__call__(policy, settings)

    plan = plan_on(url, tmp_path)
    arms = {arm.name: arm.policy for arm in plan.arms}
    for expected in (9, 9, 0):
        number = os.fork()
        if number == 0:
            code = 1
            try:
                run_worker(plan, Deadly(noise=0.001), n_trials=7)
                code = 0
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(number, 0)[1]) == expected
    told = [trial for trial in run_alone(trials_of(url)) if trial.user_attrs.get("arm") == deadly]
    assert [trial.user_attrs["outcome"]["kind"] for trial in told] == ["crashed"]
    assert "2 workers ended without a word" in told[0].user_attrs["outcome"]["message"]
    assert len(run_alone(trials_of(url))) == 7


def test_fp32_that_fails_ends_a_worker_with_the_tasks_own_traceback(url: str, tmp_path: Path) -> None:
    class Broken(FakeMeasure):
        def __call__(self, policy: Policy, settings: TrialSettings) -> Outcome:
            return Outcome(kind="user_error", message="KeyError: 'label'", traceback="line 7")

    with pytest.raises(TaskError, match=r"(?s)fails in FP32: KeyError: 'label'.*line 7"):
        run_worker(plan_on(url, tmp_path), Broken(), n_trials=4)
    assert [trial.state for trial in trials_of(url)] == [TrialState.FAIL]


def test_the_trial_of_a_machine_that_is_gone_is_run_again_when_its_heartbeats_have_stopped(
    workers: Start, server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = server.rpartition("/")[0] + "/postgres"
    with workers(url, tmp_path, workers=1, n_trials=8, seconds=0.3, heartbeat=1) as group:
        while len(begun(tmp_path)) < 3:
            assert group.some_are_there()
            time.sleep(0.02)
        os.kill(group.numbers[0], signal.SIGKILL)
    left = [trial for trial in trials_of(url) if trial.state == TrialState.RUNNING]
    assert len(left) == 1
    monkeypatch.setattr(presence, "this_machine", lambda: "another")
    notes: list[str] = []

    class Listener(Events):
        def note(self, text: str) -> None:
            notes.append(text)

    started = time.monotonic()
    measure = FakeMeasure(noise=0.001)
    assert run_worker(plan_on(url, tmp_path), measure, events=Listener()) == 8
    assert time.monotonic() - started > presence.GRACE - 1  # seconds without a heartbeat
    assert any("are marked as failed and run again" in note for note in notes)
    assert trials_of(url)[left[0].number].state == TrialState.FAIL


def test_a_process_that_nobody_has_waited_for_is_gone_all_the_same() -> None:
    read, write = os.pipe()
    number = os.fork()
    if number == 0:
        os.read(read, 1)
        os._exit(0)
    assert presence.start_of(number) == presence.start_of(number) != ""
    os.write(write, b".")
    os.waitid(os.P_PID, number, os.WEXITED | os.WNOWAIT)  # it has ended, and is still listed
    assert Path(f"/proc/{number}").exists()
    assert presence.start_of(number) == ""
    os.waitpid(number, 0)
    os.close(read)
    os.close(write)


def test_a_trial_whose_process_is_too_slow_for_its_heartbeats_is_still_its_own(
    workers: Start, url: str, tmp_path: Path
) -> None:
    with workers(url, tmp_path, workers=2, n_trials=8, seconds=0.5, heartbeat=1) as group:
        while len(begun(tmp_path)) < 4:  # FP32, which all wait for, is told
            assert group.some_are_there()
            time.sleep(0.02)
        slow = begun(tmp_path)[-1][0]
        os.kill(slow, signal.SIGSTOP)
        stopped = time.monotonic()
        try:
            while len(begun(tmp_path)) < 8 or time.monotonic() < stopped + presence.GRACE + 2:
                assert group.some_are_there()
                assert time.monotonic() < stopped + 60
                time.sleep(0.1)
        finally:
            os.kill(slow, signal.SIGCONT)
        assert set(group.end().values()) == {0}, group.told()
    assert Counter(policy for _, policy in begun(tmp_path)).most_common(1)[0][1] == 1
    assert len(run_alone(trials_of(url))) == len(trials_of(url)) == 8


def test_a_place_is_kept_for_a_baseline_that_must_run_again(url: str, tmp_path: Path) -> None:
    plan = plan_on(url, tmp_path)
    with pytest.raises(KeyboardInterrupt):
        run_worker(plan, FakeMeasure(noise=0.001, stop_at=2), n_trials=4)
    measure = FakeMeasure(noise=0.001)
    with opened(url) as storage, present(plan, storage, "worker", Events()) as here:
        study = open_search(plan, storage, learn(plan, measure, Events(), here), here)
        assert {record.arm for record in study.records} == {"fp32"}
        settings = {"settings": plan.trial, "events": Events(), "timeout_seconds": None}
        runner = _Runner(study, measure, plan.arms, n_trials=4, **settings)
        assert runner.room == 1  # of four, beside one that is finished and two baselines


def test_what_another_process_is_asking_for_is_not_yet_one_that_it_runs(url: str, tmp_path: Path) -> None:
    """Optuna's own samplers write a trial's parameters one by one, and its policy after them."""
    plan = plan_on(url, tmp_path, sampler="random")
    measure = FakeMeasure(noise=0.001)
    run_worker(plan, measure, n_trials=4)
    with opened(url) as storage, present(plan, storage, "worker", Events()) as here:
        study = open_search(plan, storage, learn(plan, measure, Events(), here), here)
        with opened(url) as other:
            optuna.load_study(study_name="shared", storage=other).ask()
        with study.turn():
            assert study.elsewhere() == {}


def test_sqlite_that_another_machine_runs_is_refused(
    workers: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"sqlite:///{tmp_path / 'study.db'}"
    with workers(url, tmp_path, workers=1, n_trials=4, seconds=60.0, heartbeat=1) as group:
        while not begun(tmp_path):
            assert group.some_are_there()
            time.sleep(0.02)
        with monkeypatch.context() as patch:
            patch.setattr(presence, "this_machine", lambda: "another")
            with pytest.raises(StudyError, match=r"in use by a process of another machine.*postgresql://"):
                run_worker(plan_on(url, tmp_path), FakeMeasure(), n_trials=4)
            os.kill(group.numbers[0], signal.SIGKILL)  # then its heartbeats stop, and the study is free
            measure = FakeMeasure(noise=0.001)
            assert run_worker(plan_on(url, tmp_path), measure, n_trials=4) == 4


MOUNTED = """\
/dev/vda / ext4 rw 0 0
proc /proc proc rw 0 0
server:/home /mnt/my\\040home nfs4 rw 0 0
/dev/vdb /mnt/my\\040home/scratch xfs rw 0 0
"""


@pytest.mark.parametrize(
    ("place", "kind"),
    [("/mnt/my home/me", "nfs4"), ("/mnt/my home/scratch/me", None), ("/home/me", None), ("/mnt/my homely", None)],
)
def test_sqlite_on_a_network_folder_is_refused(
    place: str, kind: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mounts").write_text(MOUNTED)
    monkeypatch.setattr(network_folders, "MOUNTS", tmp_path / "mounts")
    if kind is None:
        network_folders.refuse_network_folder(f"sqlite:///{place}/study.db")
        network_folders.refuse_network_folder("postgresql://me@host/db")
        return
    with pytest.raises(UsageError, match=r"study\.db: .*network file system \(nfs4\).*postgresql://"):
        open_storage(f"sqlite:///{place}/study.db")


class Card(FakeMeasure):
    """A GPU whose clock sinks by a fifth from the trial number `hot` on."""

    def __init__(self, hot: int) -> None:
        super().__init__(noise=0.001)
        self._hot = hot

    def __call__(self, policy: Policy, settings: TrialSettings) -> Outcome:
        outcome = super().__call__(policy, settings)
        speed = 0.8 if len(self.order) > self._hot else 1.0
        value = Number(value=outcome.throughput_samples_per_second.value * speed, kind="measured")  # type: ignore[union-attr]
        return outcome.model_copy(update={"throughput_samples_per_second": value})


def test_a_worker_times_stock_autocast_beside_its_trials_and_tells_when_its_device_drifts(tmp_path: Path) -> None:
    import dataclasses

    url = f"sqlite:///{tmp_path / 'study.db'}"
    plan = dataclasses.replace(plan_on(url, tmp_path, n_trials=20), target_is_here=True)
    notes: list[str] = []

    class Listener(Events):
        def note(self, text: str) -> None:
            notes.append(text)

    run_worker(plan, Card(hot=10), n_trials=20, events=Listener())
    assert any("stock autocast runs -20.0% against the start of this worker (measured)" in note for note in notes)
    finished = run_alone(trials_of(url))
    outcomes = [Outcome(**trial.user_attrs["outcome"]) for trial in finished]
    assert [o.throughput_over_autocast for o in outcomes if o.throughput_over_autocast is None] == []
    stock = next(o for o, t in zip(outcomes, finished, strict=True) if t.user_attrs.get("arm") == "autocast fp16")
    assert stock.throughput_over_autocast == pytest.approx(1.0)
    anchors = sorted({o.autocast_here.value for o in outcomes if o.autocast_here is not None})
    assert anchors == pytest.approx([0.8e3 / 0.6, 1e3 / 0.6])
    later = outcomes[2 * ANCHOR_EVERY]
    assert later.throughput_samples_per_second is not None
    assert later.throughput_over_autocast == pytest.approx(later.throughput_samples_per_second.value / (0.8e3 / 0.6))
    notes.clear()
    run_search(dataclasses.replace(plan), FakeMeasure(noise=0.001), events=Listener())
    assert any(note.startswith("worker ") and "of the study's median (measured)" in note for note in notes)


def test_no_password_is_in_the_study_or_in_what_a_worker_says(server: str, tmp_path: Path) -> None:
    plan = tiny_plan(tmp_path, storage=server, study_name="quiet", heartbeat_seconds=1)
    run_worker(plan, FakeMeasure(noise=0.001), n_trials=3)
    with opened(server) as storage:
        study = optuna.load_study(study_name="quiet", storage=storage)
        kept = json.dumps([study.user_attrs, *(trial.user_attrs for trial in study.trials)])
    assert "s3cret" not in kept
    assert "127.0.0.1" not in kept
    with pytest.raises(StudyError) as refused:
        open_storage(server.replace("s3cret", "wr0ng"))
    assert "wr0ng" not in str(refused.value)


@pytest.mark.parametrize("how", ["environment", "file"])
def test_the_password_may_come_from_the_environment_or_a_file(
    how: str, server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if how == "environment":
        monkeypatch.setenv("PGPASSWORD", "s3cret")
    else:
        (tmp_path / "pgpass").write_text("127.0.0.1:*:*:autoprec:s3cret\n")
        (tmp_path / "pgpass").chmod(0o600)
        monkeypatch.setenv("PGPASSFILE", str(tmp_path / "pgpass"))
    plan = tiny_plan(tmp_path, storage=server.replace(":s3cret", ""), study_name=how, heartbeat_seconds=1)
    assert run_worker(plan, FakeMeasure(noise=0.001), n_trials=3) == 3
