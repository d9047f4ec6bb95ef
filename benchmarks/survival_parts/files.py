"""Kills and full disks while files are written."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from autoprec.policy import Policy, load_policy
from survival_parts.killed_search import MARK, N_TRIALS, PROGRAM, finished_trials, num_run, start_search


def files(kills: int, seed: int) -> None:
    rng = random.Random(seed)
    policies = [Policy(default="autocast", modules={f"layer{n}": "fp32" for n in range(size)}) for size in (50, 400)]
    texts = {policy.to_json() for policy in policies}
    with tempfile.TemporaryDirectory() as root:
        path = Path(root) / "policy.json"
        policies[0].save(path)
        num_whole = sum(survives_a_kill(path, policies, texts, rng) for _ in range(kills))
        print(f"files: {num_whole} of {kills} kills during export left the old or the new policy")
    with small_disk() as (folder, how):
        print(f"files: policy.json on {how}: {full_export(folder, policies)}")
    with small_disk() as (folder, how):
        print(f"files: a search on {how}: {full_search(folder)}")


def survives_a_kill(path: Path, policies: list[Policy], texts: set[str], rng: random.Random) -> bool:
    child = os.fork()
    if child == 0:
        while True:
            for policy in policies:
                policy.save(path)
    time.sleep(rng.uniform(0, 0.03))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return load_policy(path).to_json() in texts


@contextlib.contextmanager
def small_disk() -> Iterator[tuple[Path, str]]:
    """Yield a folder of 512 KiB: a tmpfs, else any folder under a limit on the size of files."""
    root = Path(tempfile.mkdtemp())
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(root)], capture_output=True)
    try:
        yield root, "a tmpfs of 512 KiB" if mounted.returncode == 0 else "a folder with files of at most 200 KiB"
    finally:
        if mounted.returncode == 0:
            subprocess.run(["umount", "--lazy", str(root)], check=True)  # a process that ends may still be there
        shutil.rmtree(root)


def full_export(folder: Path, policies: list[Policy]) -> str:
    path = folder / "policy.json"
    policies[0].save(path)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if folder.is_mount():
        fill(folder)
    else:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2_000, before[1]))
    try:
        policies[1].save(path)
    except OSError as error:
        said = error.strerror
    else:
        said = "no error"
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    return f"{'the old policy is there' if load_policy(path) == policies[0] else 'the policy is LOST'} ({said})"


def fill(folder: Path) -> None:
    with contextlib.suppress(OSError), (folder / "ballast").open("wb", buffering=0) as file:
        while True:
            file.write(b"\0" * 4096)


def full_search(folder: Path) -> str:
    """Fill the disk while a search runs; free it and go on."""
    mark = f"{os.getpid()}-full"
    log = folder.parent / f"{folder.name}-run.log"
    search = folder / "run"
    process = subprocess.Popen(
        [sys.executable, PROGRAM, "search", "--folder", str(search)],
        env={**os.environ, MARK: mark},
        stdout=log.open("wb"),
        stderr=subprocess.STDOUT,
        preexec_fn=None if folder.is_mount() else limit_files,
    )
    while process.poll() is None and (not folder.is_mount() or len(finished_trials(search)) < 5):
        time.sleep(0.2)
    if folder.is_mount():
        fill(folder)
    code = process.wait(600)
    lines = [line for line in log.read_text().splitlines() if line.startswith("autoprec:")]
    before = finished_trials(search)
    with contextlib.suppress(FileNotFoundError):
        (folder / "ballast").unlink()
    target = Path(tempfile.mkdtemp()) / "run"
    shutil.copytree(search, target)
    run_again = start_search(target, mark)
    run_again.wait(600)
    after = finished_trials(target)
    kept = all(after.get(number) == trial for number, trial in before.items())
    said = lines[0].split("; ")[0].replace(str(folder), "...") if lines else log.read_text()[-300:]
    shutil.rmtree(target.parent)
    log.unlink()
    return (
        f"exit {code} after {len(before)} trials with {len(lines)} line(s) ({said}); on a larger disk it went on to "
        f"{num_run(after)} of {N_TRIALS}, the first ones {'kept' if kept else 'LOST'}"
    )


def limit_files() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (200 * 1024, 200 * 1024))
