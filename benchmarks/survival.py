"""What trials and searches survive, tried out: kills, hangs, crashes, full disks, NaN. Prints one figure a promise.

    python benchmarks/survival.py                            # all of it; up to 20 minutes on one core
    python benchmarks/survival.py chaos --kills 20           # one part, smaller

The networks are cheap, the processes, kills, files and databases are real. Linux: a full disk is a tmpfs of
512 KiB where one may be mounted, else a limit on the size of files.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import random
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from autoprec.policy import Policy, load_policy

TASKS = Path(__file__).with_name("survival_tasks.py")
MARK = "AUTOPREC_SURVIVAL"
N_TRIALS = 16
FP32, BF16 = Policy(default="fp32"), Policy(default="autocast", dtype="bf16")


# The search that is killed: this script again, in a process of its own.


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
    command = [sys.executable, __file__, "search", "--folder", str(folder), "--workers", str(num_workers)]
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


def num_run(trials: dict[int, Any]) -> int:
    return sum("cached_from" not in trial[3] for trial in trials.values())


# Every kind of end.


EXPECTED = {
    "os.abort": "crashed",
    "segfault": "crashed",
    "os._exit(3)": "crashed",
    "sys.exit(3)": "crashed",
    "kill -9": "crashed",
    "spin": "timeout",
    "spin with the lock": "timeout",
    "unpicklable": "user_error",
    "untold": "user_error",
    "torch.OutOfMemoryError": "out_of_memory",
    "MemoryError": "out_of_memory",
    "a tensor too large": "out_of_memory",
    "cuBLAS": "out_of_memory",
    "cuDNN": "out_of_memory",
    "HIP": "out_of_memory",
    "MPS": "out_of_memory",
    "shared memory": "out_of_memory",
    "fork": "out_of_memory",
    "std::bad_alloc": "out_of_memory",
    "device-side assert": "crashed",
    "not implemented": "unsupported",
    "a wrong key": "user_error",
    "NaN": "non_finite_loss",
    "a buffer": "non_finite_buffer",
}


def ends() -> None:
    with open_worker() as worker:
        alone = numbers(worker.run(FP32, short()))
    wrong = []
    for fault, kind in EXPECTED.items():
        with open_worker(fault) as worker:
            outcome = worker.run(BF16, short(), timeout_seconds=2.0)
            after = numbers(worker.run(FP32, short(), timeout_seconds=60.0))
        if outcome.kind != kind or after != alone:
            wrong.append(fault)
        print(f"end: {fault}: {outcome.kind}{'' if outcome.kind == kind else f' (not {kind})'}: {outcome.message[:90]}")
    num_right = len(EXPECTED) - len(wrong)
    print(
        f"ends: {num_right} of {len(EXPECTED)} recorded as their kind, the next trial equal to one alone {wrong or ''}"
    )


def open_worker(fault: str = "none") -> Any:
    from autoprec.tasks import TaskSource
    from autoprec.trials import Worker

    return Worker(TaskSource("function", {"name": f"{TASKS}:task", "arguments": {"fault": fault}}), num_threads=1)


def numbers(outcome: Any) -> dict[str, Any]:
    return outcome.model_dump(exclude={"wall_seconds", "step_seconds_here", "phase_seconds"})


# Times.


def times(count: int) -> None:
    first = timed(lambda: open_worker().start())
    with open_worker() as worker:
        ready = [timed(worker.start)]
        for _ in range(4):
            os.kill(worker.pid, signal.SIGKILL)
            ready.append(timed(worker.start))
        print(f"times: a new worker ready within {max(ready):.2f} s (worst of {len(ready)}); the first, with the fork "
              f"server, {first:.2f} s")  # fmt: skip
        warm = [overhead(worker.run) for _ in range(count)]
    fresh = [overhead(run_in_a_fresh_worker) for _ in range(5)]
    spawned = [timed(lambda: subprocess.run([sys.executable, "-c", SPAWNED], check=True)) for _ in range(3)]
    print(
        f"times: overhead of a warm trial {statistics.median(warm) * 1e3:.1f} ms (median of {count}, worst "
        f"{max(warm) * 1e3:.0f} ms); of a fresh process from the fork server {statistics.median(fresh) * 1e3:.0f} ms; "
        f"of a new interpreter {statistics.median(spawned) * 1e3:,.0f} ms and more"
    )
    with open_worker("spin") as worker:
        worker.start()
        late = [timed(lambda: worker.run(BF16, short(), timeout_seconds=2.0)) - 2.0]
        late.append(timed(lambda: [worker.start(), worker.run(BF16, short(), timeout_seconds=2.0)]) - 2.0)
    with open_worker("spin with the lock") as worker:
        worker.start()
        late.append(timed(lambda: worker.run(BF16, short(), timeout_seconds=2.0)) - 2.0)
    print(f"times: a hung trial ended {max(late):.2f} s after its time limit (worst of {len(late)})")


SPAWNED = "import autoprec.trials.runner, autoprec.estimates"


def timed(act: Callable[[], Any]) -> float:
    started = time.perf_counter()
    act()
    return time.perf_counter() - started


def overhead(run: Callable[..., Any]) -> float:
    """Return the time that a trial takes beyond the trial itself, as its own process measured it."""
    started = time.perf_counter()
    outcome = run(FP32, short())
    return time.perf_counter() - started - outcome.wall_seconds


def run_in_a_fresh_worker(policy: Policy, settings: Any) -> Any:
    with open_worker() as worker:
        return worker.run(policy, settings)


# Files.


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
        [sys.executable, __file__, "search", "--folder", str(search)],
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


# Many trials, and NaN.


def endurance(count: int) -> None:
    import torch

    torch.set_num_threads(1)
    from autoprec.search.events import Events
    from autoprec.search.measuring import open_measure
    from autoprec.search.pipeline import run_search
    from autoprec.search.plan import SearchSettings, prepare_search
    from autoprec.search.proof import build_proof
    from autoprec.tasks.source import resolve_task

    class Watch(Events):
        """Notes after each trial what this process holds, and the time between trials that no trial took."""

        def __init__(self) -> None:
            self.resident: list[int] = []
            self.files: list[int] = []
            self.overhead: list[float] = []
            self.last = time.perf_counter()

        def trial_finished(self, record: Any, *, num_finished: int, n_trials: int) -> None:
            now = time.perf_counter()
            self.overhead.append(now - self.last - record.outcome.wall_seconds)
            self.resident.append(int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"))
            self.files.append(len(os.listdir("/proc/self/fd")))
            self.last = time.perf_counter()

    watch = Watch()
    with tempfile.TemporaryDirectory() as root:
        settings = SearchSettings(
            n_trials=count, output=root, proof=build_proof(0.5, 4, num_steps=4), num_workers=1, sampler="random"
        )
        plan = prepare_search(resolve_task(f"{TASKS}:task"), trial=short(), settings=settings)
        with open_measure(plan.task, timeout_seconds=60) as measure:
            run_search(plan, measure, events=watch)
    grown = (watch.resident[-1] - watch.resident[20]) / 2**20
    first, last = (statistics.median(part) for part in (watch.overhead[20:120], watch.overhead[-100:]))
    print(
        f"endurance: {len(watch.resident)} trials: resident memory of the search grew by {grown:.1f} MiB after the 20th"
        f"; open files {watch.files[20]} then, {watch.files[-1]} at the end; overhead with the study's writes "
        f"{first * 1e3:.0f} ms (trials 20 to 120), {last * 1e3:.0f} ms (last 100): {last / first:.2f}x"
    )


def nan() -> None:
    with tempfile.TemporaryDirectory() as root:
        result = run_the_search(Path(root) / "run", function="overflowing", n_trials=30)
        failed = [r for r in result.records if not r.outcome.is_ok and not r.is_cached]
        visits = [r for r in result.records if not r.is_cached and r.number > min(f.number for f in failed)]
        more = [r for r in visits if not r.outcome.is_ok]
        kinds = sorted({r.outcome.kind for r in failed})
        infeasible = all(not r.is_feasible for r in failed)
        values = [value for trial in result.study.trials for value in trial.values or ()]
        finite = all(math.isfinite(value) for value in values)
        texts = [path.read_text() for path in (Path(root) / "run").glob("*.json")]
        clean = finite and not any(word in text for text in texts for word in ("NaN", "Infinity"))
        print(
            f"nan: recorded as {', '.join(kinds)}, infeasible: {infeasible}; {len(more)} more such trials among the "
            f"{len(visits)} after the first; no NaN in any value or file: {clean}; the unit in the policy: "
            f"{result.policy.modules.get('length', result.policy.default)}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", default="all")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--trials", type=int, default=500)
    parser.add_argument("--folder", type=Path)
    given = parser.parse_args()
    if given.part == "search":
        search_as_a_program(given)
    parts: dict[str, Callable[[], None]] = {
        "ends": ends,
        "times": lambda: times(30),
        "files": lambda: files(200, given.seed),
        "nan": nan,
        "chaos": lambda: chaos(given.kills, given.seed, given.workers),
        "endurance": lambda: endurance(given.trials),
    }
    started = time.monotonic()
    for name, part in parts.items():
        if given.part in ("all", name):
            part()
            print(f"({name}: {time.monotonic() - started:.0f} s since the start)", flush=True)


def search_as_a_program(given: argparse.Namespace) -> None:
    from autoprec.errors import AutoprecError

    try:
        run_the_search(given.folder, num_workers=given.workers)
    except AutoprecError as error:
        print(f"autoprec: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    sys.exit(0)


if __name__ == "__main__":
    main()
