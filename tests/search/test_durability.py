"""A search that is killed, locked out or out of disk space loses at most the trial that was running."""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import optuna
import pytest
import sqlalchemy
from optuna.storages import RDBStorage
from optuna.trial import TrialState
from toys import FakeMeasure, TwoAtOnce, ran, tiny_plan

import autoprec.search.plan as plan_module
from autoprec.errors import StudyError
from autoprec.policy import Policy
from autoprec.search.fingerprint import first_difference
from autoprec.search.pipeline import SearchResult, run_search
from autoprec.trials.outcome import NonFinite, Outcome, TrialSettings

WRITES = [name for name in vars(RDBStorage) if name.startswith(("create_new_trial", "set_trial_", "set_study_"))]


def run(folder: Path, measure: FakeMeasure | None = None, **settings: object) -> SearchResult:
    return run_search(tiny_plan(folder, **settings), measure or FakeMeasure(noise=0.001))


SLOW_SHARES = [pytest.param(share / 20, marks=pytest.mark.slow) for share in range(8, 20)]
"""`benchmarks/survival.py` kills real processes at random moments besides."""


class KilledError(BaseException):
    """Ends a search as a kill does: nothing that it does after it reaches the study."""


@contextmanager
def killed_at(write: int) -> Iterator[list[int]]:
    """Let the study take so many writes and refuse all that follow; yield the count of those that were taken."""
    count = [0]

    def limited(method: Any) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            if count[0] >= write:
                raise KilledError
            count[0] += 1
            return method(*arguments, **named)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in WRITES:
            patch.setattr(RDBStorage, name, limited(getattr(RDBStorage, name)))
        yield count


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[type[FakeMeasure], tuple[SearchResult, int]]:
    """One unbroken search for each measurement, and the number of its writes."""
    found = {}
    for kind in (FakeMeasure, TwoAtOnce):
        with killed_at(10**9) as count:
            result = run(tmp_path_factory.mktemp("whole"), measure(kind), n_trials=9)
        found[kind] = (result, count[0])
    return found


def measure(kind: type[FakeMeasure]) -> FakeMeasure:
    return kind() if kind is TwoAtOnce else kind(noise=0.001)


@pytest.mark.parametrize("share", [pytest.param(0.02, marks=pytest.mark.slow), 0.3, *SLOW_SHARES])
@pytest.mark.parametrize("kind", [FakeMeasure, TwoAtOnce], ids=["one at a time", "two at once"])
def test_a_search_killed_at_any_write_ends_as_an_unbroken_one(
    kind: type[FakeMeasure], share: float, tmp_path: Path, whole: dict[type[FakeMeasure], tuple[SearchResult, int]]
) -> None:
    expected, num_writes = whole[kind]
    with killed_at(int(share * num_writes)), pytest.raises(KilledError):
        run(tmp_path, measure(kind), n_trials=9)
    before = {t.number: (t.params, t.values) for t in all_trials(tmp_path) if t.state == TrialState.COMPLETE}
    result = run(tmp_path, measure(kind), n_trials=9)
    trials = {t.number: (t.params, t.values) for t in result.study.trials}
    assert before.items() <= trials.items()
    assert ran(result) == ran(expected)
    assert result.choice == expected.choice
    assert result.study.get_trials(states=(TrialState.RUNNING,)) == []


def all_trials(folder: Path) -> list[optuna.trial.FrozenTrial]:
    """Return the trials of a folder's study; none where it was killed before it was made."""
    try:
        return optuna.load_study(study_name=None, storage=f"sqlite:///{folder / 'study.db'}").trials
    except (KeyError, ValueError):
        return []


def test_a_trial_whose_outcome_was_stored_is_finished_and_not_run_again(tmp_path: Path) -> None:
    original = RDBStorage.set_trial_state_values
    is_killed = False

    def stop_at_the_third(self: RDBStorage, trial_id: int, state: TrialState, values: Any = None) -> bool:
        nonlocal is_killed
        is_killed = is_killed or (values is not None and trial_id == 3)
        if is_killed:
            raise KilledError
        return original(self, trial_id, state, values)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RDBStorage, "set_trial_state_values", stop_at_the_third)
        with pytest.raises(KilledError):
            run(tmp_path, n_trials=6)
    again = FakeMeasure(noise=0.001)
    result = run(tmp_path, again, n_trials=6)
    assert [record.number for record in result.records][:3] == [0, 1, 2]
    assert sum(seed == 0 for _, seed in again.order) == 3


def test_the_same_study_from_another_folder_is_refused_with_the_holders_number(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'shared.db'}"

    def second(*_: object) -> Outcome:
        return run_search(tiny_plan(tmp_path / "b", storage=url, study_name="mine"), FakeMeasure())  # type: ignore[return-value]

    with pytest.raises(StudyError, match=rf"another search \(process {os.getpid()}\) is running on mine"):
        run_search(tiny_plan(tmp_path / "a", storage=url, study_name="mine"), second)


def test_a_reader_that_never_lets_go_delays_nothing_and_a_writer_is_waited_for(tmp_path: Path) -> None:
    """C48: the lock is held for less than a second here, and waited for up to a minute."""
    run(tmp_path, n_trials=6)
    reader, writer = (
        sqlite3.connect(tmp_path / "study.db", isolation_level=None, check_same_thread=False) for _ in range(2)
    )
    reader.execute("BEGIN")
    count = reader.execute("SELECT count(*) FROM trials").fetchone()
    writer.execute("BEGIN IMMEDIATE")
    threading.Timer(0.3, lambda: writer.execute("ROLLBACK")).start()
    started = time.monotonic()
    result = run(tmp_path, n_trials=7)
    assert time.monotonic() - started < 30  # half of what a writer waits for a lock
    assert sum(not record.is_cached for record in result.records) == 7
    assert reader.execute("SELECT count(*) FROM trials").fetchone() == count
    reader.close()
    writer.close()


def test_a_full_disk_is_one_clear_error_and_no_finished_trial_is_lost(tmp_path: Path) -> None:
    def fill(connection: Any, _: Any) -> None:
        connection.execute("PRAGMA max_page_count=33")  # SQLite then says what it says of a full disk

    sqlalchemy.event.listen(sqlalchemy.Engine, "connect", fill)
    try:
        with pytest.raises(StudyError, match=r"there is no room left on the disk; all finished trials are kept"):
            run(tmp_path, n_trials=9)
    finally:
        sqlalchemy.event.remove(sqlalchemy.Engine, "connect", fill)
    before = {t.number: t.values for t in all_trials(tmp_path) if t.state == TrialState.COMPLETE}
    result = run(tmp_path, n_trials=9)
    assert before
    assert before.items() <= {t.number: t.values for t in result.study.trials}.items()


def test_a_search_leaves_whole_files_alone(tmp_path: Path) -> None:
    """Neither the log of a database that is open, nor what a killed export left."""
    (tmp_path / ".autoprec-abc123.tmp").write_text("{")
    result = run(tmp_path, n_trials=6)
    names = {path.name for path in tmp_path.iterdir() if not path.name.endswith(".lock")}
    assert names == {"study.db", "policy.json", "front.json"}
    assert result.plan.folder == tmp_path


def test_the_fingerprint_has_all_that_decides_the_numbers(tmp_path: Path) -> None:
    identity = tiny_plan(tmp_path).identity
    assert {
        "task.name",
        "task.code",
        "task.settings",
        "task.optimizer",
        "model",
        "space",
        "trial.device",
        "trial.seed",
        "objectives.accuracy",
        "proof.margin",
        "versions.torch",
    } <= set(identity)
    changed = identity | {"objectives.accuracy": "minimize"}
    assert first_difference(identity, changed) == 'objectives.accuracy was "maximize", now "minimize"'


def test_which_of_equal_devices_ran_the_trials_is_no_part_of_the_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_module.torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    first, second = (plan_module.trial_identity(TrialSettings(device=name)) for name in ("cuda:0", "cuda:1"))
    assert first == second
    assert (first["device"], first["device_name"]) == ("cuda", "NVIDIA A100")


class NamesTheNorm(FakeMeasure):
    """The norm overflows in FP16, as a trial finds and names it."""

    def __call__(self, policy: Policy, settings: TrialSettings) -> Outcome:
        outcome = super().__call__(policy, settings)
        place = NonFinite(step=1, module="norm", what="forward output, from finite input")
        return outcome if outcome.is_ok else outcome.model_copy(update={"first_non_finite": place})


def test_nan_under_low_precision_is_infeasible_and_no_file_has_it(tmp_path: Path) -> None:
    """C35 and C46: the search learns from it, and keeps that unit alone out of FP16."""

    def fail(policy: Policy) -> str | None:
        return "non_finite_loss" if policy.modules.get("norm") == "fp16" else None

    result = run(tmp_path, NamesTheNorm(noise=0.001, fail=fail), n_trials=12)
    failed = [record for record in result.records if not record.outcome.is_ok]
    assert failed
    assert all(not record.is_feasible for record in failed)
    assert sum(not record.arm and not record.is_cached for record in failed) <= 3
    assert result.policy.modules.get("norm") != "fp16"
    assert any(record.is_feasible and "fp16" in record.policy.modules.values() for record in result.records)
    for path in tmp_path.glob("*.json"):
        assert "NaN" not in path.read_text()
        assert "Infinity" not in path.read_text()
