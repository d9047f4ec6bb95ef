"""Searches on an engine, as a person starts them, and what is left of them."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Protocol

import optuna
from recorded_task import RECORD, SECONDS

from autoprec import load_policy
from autoprec.errors import StudyError
from autoprec.search.storage import opened

TASK = f"{Path(__file__).with_name('recorded_task.py')}:task"
TOTAL = 8
SHORT = ["--n-trials", str(TOTAL), "--steps", "4", "--max-seeds", "2", "--heartbeat", "2"]
STORAGE = "storage.txt"


class Start(Protocol):
    def __call__(
        self,
        folder: Path,
        engine: str,
        *more: str,
        task: str = TASK,
        seconds: float = 0.5,
        storage: str | None = None,
    ) -> subprocess.Popen[str]: ...


def storage_of(folder: Path) -> str:
    return (folder / STORAGE).read_text()


def start_search(
    folder: Path,
    engine: str,
    *more: str,
    task: str = TASK,
    seconds: float = 0.5,
    storage: str | None = None,
) -> subprocess.Popen[str]:
    (folder / SECONDS).write_text(str(seconds))
    (folder / STORAGE).write_text(storage or f"sqlite:///{folder / 'study.db'}")
    place = ["--storage", storage_of(folder), "--study-name", "on-an-engine", "-o", str(folder / "run")]
    return subprocess.Popen(
        [sys.executable, "-m", "autoprec", "search", "--task", task, *SHORT, *place, "--engine", engine, *more],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def record(folder: Path) -> list[tuple[str, int]]:
    """Return (devices that it saw, process) of each training that was begun."""
    path = folder / RECORD
    lines = [line.rpartition(" ") for line in path.read_text().splitlines()] if path.exists() else []
    return [(devices, int(process)) for devices, _, process in lines]


def workers(folder: Path) -> list[int]:
    """Return the `autoprec worker` processes on the study in a folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = path.read_bytes().decode(errors="replace").split("\0")
            if "worker" in words and any(str(folder) in word for word in words):
                found.append(int(path.parent.name))
    return found


def parent_of(process: int) -> int:
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


def wait_for_trials(search: subprocess.Popen[str], folder: Path, *, count: int) -> None:
    deadline = time.monotonic() + 300
    while len(finished(folder)) < count:
        assert search.poll() is None, search.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.2)


def finished(folder: Path) -> list[optuna.trial.FrozenTrial]:
    """Return the trials that were run to their end; none where there is no study yet."""
    url = storage_of(folder)
    if url.startswith("sqlite:") and not (folder / "study.db").exists():
        return []
    try:
        with opened(url) as storage:
            trials = optuna.load_study(study_name="on-an-engine", storage=storage).get_trials(deepcopy=False)
    except StudyError:  # the database is there, and the study not yet
        return []
    ran = [trial for trial in trials if "outcome" in trial.user_attrs and trial.state.is_finished()]
    return [trial for trial in ran if "cached_from" not in trial.user_attrs]


def check_ended(search: subprocess.Popen[str], folder: Path) -> None:
    """Check that a search ends with a recommendation, the total, no policy twice, and no worker left."""
    stdout, stderr = search.communicate(timeout=400)
    assert search.returncode in (0, 3), stderr
    assert "the trials are done; the proof runs as one more job" in stdout
    assert load_policy(folder / "run" / "policy.json").recommendation is not None
    assert json.loads((folder / "run" / "front.json").read_text())
    ran = finished(folder)
    assert len(ran) == TOTAL
    assert len({trial.user_attrs["policy_key"] for trial in ran}) == TOTAL
    assert workers(folder) == []
