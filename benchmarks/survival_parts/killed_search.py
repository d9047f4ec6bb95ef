"""The search that is killed: survival.py again, in a process of its own, and what it leaves."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

PROGRAM = str(Path(__file__).resolve().parents[1] / "survival.py")
TASKS = Path(__file__).with_name("tasks.py")
MARK = "AUTOPREC_SURVIVAL"
N_TRIALS = 16


def run_the_search(folder: Path, *, function: str = "task", n_trials: int = N_TRIALS, num_workers: int = 1) -> Any:
    """Search the task in `folder`, trials in worker processes; what `autoprec search` does with shorter trainings."""
    import torch

    torch.set_num_threads(1)
    from autoprec.search.measuring import open_measure
    from autoprec.search.pipeline import run_search
    from autoprec.search.plan import SearchSettings, prepare_search
    from autoprec.search.proof import build_proof
    from autoprec.tasks.source import resolve_task

    proof = build_proof(0.5, 4, num_steps=4)
    settings = SearchSettings(n_trials=n_trials, output=folder, proof=proof, num_workers=num_workers)
    plan = prepare_search(resolve_task(f"{TASKS}:{function}"), trial=short(), settings=settings)
    with open_measure(plan.task, timeout_seconds=60, num_workers=num_workers) as measure:
        return run_search(plan, measure)


def short() -> Any:
    from autoprec.trials import TrialSettings

    return TrialSettings(warmup_steps=1, measured_steps=3, batchnorm_batches=1)


def start_search(folder: Path, mark: str, *, num_workers: int = 1) -> subprocess.Popen[bytes]:
    command = [sys.executable, PROGRAM, "search", "--folder", str(folder), "--workers", str(num_workers)]
    with (folder.parent / f"{folder.name}.log").open("ab") as log:
        return subprocess.Popen(command, env={**os.environ, MARK: mark}, stdout=log, stderr=log)


def processes(mark: str) -> dict[int, int]:
    """Return the live processes that carry the mark in their environment, with their parents."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state, parent = (path / "stat").read_text().rpartition(")")[2].split()[:2]
            if state != "Z" and f"{MARK}={mark}".encode() in (path / "environ").read_bytes().split(b"\0"):
                found[int(path.name)] = int(parent)
    return found


def workers_of(search: int, mark: str) -> list[int]:
    """Return the worker processes of a search: children of its fork server that lead a session of their own."""
    found = processes(mark)
    return [pid for pid, parent in found.items() if found.get(parent) == search and is_leader(pid)]


def is_leader(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return os.getsid(pid) == pid
    return False


def all_end(mark: str, *, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while processes(mark) and time.monotonic() < deadline:
        time.sleep(0.05)
    left = processes(mark)
    for pid, parent in left.items():
        print(f"still there: {describe_process(pid)}, child of {describe_process(parent)}", file=sys.stderr, flush=True)
    return not left


def describe_process(pid: int) -> str:
    """Return what the system says of a process: its state, its command, what the kernel has it wait for."""
    told = [str(pid)]
    for name in ("stat", "cmdline", "wchan"):
        with contextlib.suppress(OSError):
            text = Path(f"/proc/{pid}/{name}").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            told.append(text.rpartition(")")[2].split()[0] if name == "stat" else text[:200])
    return " ".join(told)


def finished_trials(folder: Path) -> dict[int, Any]:
    """Return what the study keeps of each finished trial."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    if not (folder / "study.db").exists():
        return {}
    storage = optuna.storages.RDBStorage(f"sqlite:///{folder / 'study.db'}", skip_table_creation=True)
    try:
        study = optuna.load_study(study_name=None, storage=storage)
    except (KeyError, ValueError, RuntimeError):  # the kill came before the study was made
        return {}
    finally:
        storage.engine.dispose()
    return {
        t.number: (t.params, t.values, t.constraints, t.user_attrs) for t in study.trials if t.state.name == "COMPLETE"
    }


def result_of(folder: Path) -> dict[str, Any]:
    """Return what the search recommends with all its evidence, the time of writing and versions left out."""
    policy = json.loads((folder / "policy.json").read_text())
    del policy["provenance"]["created"]
    return policy


def num_run(trials: dict[int, Any]) -> int:
    return sum("cached_from" not in trial[3] for trial in trials.values())


def search_as_a_program(given: argparse.Namespace) -> None:
    from autoprec.errors import AutoprecError

    try:
        run_the_search(given.folder, num_workers=given.workers)
    except AutoprecError as error:
        print(f"autoprec: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    sys.exit(0)
