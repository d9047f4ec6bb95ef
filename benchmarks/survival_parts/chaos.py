"""Kills of a search and of its workers at random moments."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from survival_parts.killed_search import (
    all_end,
    finished_trials,
    num_run,
    result_of,
    start_search,
    workers_of,
)


def chaos(kills: int, seed: int, num_workers: int) -> None:
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as root:
        whole = Path(root) / "whole"
        seconds = unkilled(whole, num_workers)
        expected, total = result_of(whole), num_run(finished_trials(whole))
        print(f"chaos: the unkilled search of {total} trials and its proof takes {seconds:.1f} s from its lock on")
        targets = ["search", "worker"] * (kills // 2)
        rng.shuffle(targets)
        num_studies = num_kept = num_equal = num_left = num_good = num_done = 0
        while targets:
            num_studies += 1
            folder = Path(root) / f"study{num_studies}"
            done, kept, clean = kill_one_study(folder, targets, rng, seconds, num_workers)
            same = result_of(folder) == expected and num_run(finished_trials(folder)) == total
            num_kept, num_left, num_equal = num_kept + kept * done, num_left + (not clean), num_equal + same
            num_good, num_done = num_good + done * (kept and same and clean), num_done + done
            shutil.rmtree(folder)
            print(f"chaos: {num_good} of {num_done} so far (kept {kept}, same {same}, ended {clean})", flush=True)
        print(
            f"chaos: {num_good} of {kills} kills survived (half search, half worker; {num_studies} studies, "
            f"{num_workers} worker(s)): finished trials kept and equal in {num_kept} of {kills}, the same total and "
            f"the same policy file in {num_equal} of {num_studies} studies; processes left after 5 s in {num_left}"
        )


def unkilled(folder: Path, num_workers: int) -> float:
    process = start_search(folder, f"{os.getpid()}-whole", num_workers=num_workers)
    wait_for_lock(folder, process)
    started = time.monotonic()
    if process.wait(600) != 0:
        raise SystemExit((folder.parent / f"{folder.name}.log").read_text())
    return time.monotonic() - started


def wait_for_lock(folder: Path, process: subprocess.Popen[bytes]) -> None:
    while process.poll() is None:
        with contextlib.suppress(OSError):
            if (folder / ".lock").read_text() == str(process.pid):
                return
        time.sleep(0.01)


def kill_one_study(
    folder: Path, targets: list[str], rng: random.Random, seconds: float, num_workers: int
) -> tuple[int, bool, bool]:
    """Kill at random moments until the study ends; return the kills, whether all trials stayed and processes ended."""
    mark = f"{os.getpid()}-{folder.name}"
    process: subprocess.Popen[bytes] | None = None
    seen: dict[int, Any] = {}
    num_kills, kept, clean = 0, True, True
    while True:
        if process is None:
            process = start_search(folder, mark, num_workers=num_workers)
            wait_for_lock(folder, process)
        if not targets:
            process.wait(600)
        else:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(rng.uniform(0, 0.25 * seconds))
        if process.poll() is None:
            target = targets.pop()
            if target == "search":
                process.kill()
                process.wait(60)
                clean = clean and all_end(mark, seconds=5)
                process = None
            elif not kill_a_worker(process, mark):
                targets.append(target)
                continue
            num_kills += 1
        elif process.returncode != 0:
            print((folder.parent / f"{folder.name}.log").read_text()[-2000:], file=sys.stderr)
            return num_kills, False, clean
        now = finished_trials(folder)
        kept = kept and all(now.get(number) == trial for number, trial in seen.items())
        seen = now
        if process is not None and process.poll() is not None:
            return num_kills, kept, clean and all_end(mark, seconds=5)


def kill_a_worker(process: subprocess.Popen[bytes], mark: str) -> bool:
    """Kill a worker process of a search; wait for one where there is none, False where the search ends before."""
    while process.poll() is None:
        for pid in workers_of(process.pid, mark):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
                return True
        time.sleep(0.02)
    return False
