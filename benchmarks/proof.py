"""Print what the proof claims: false recommendations, planted harm, refusal, claimed ratios, verdicts of `verify`.

    python benchmarks/proof.py [aa] [planted] [rounding] [refusal] [verify]
                               [--jobs 2] [--only FIRST:LAST] [--keep FOLDER]

Cheap networks on scikit-learn's digits, trained for real; FP16 is emulated, memory computed and throughput predicted,
save in `aa`, which measures the wall-clock time of its steps here. `--jobs` makes as many studies at once, one thread
each; `--only` makes a part of the studies of each claim; `--keep` stores what each study found, so that a run that was
stopped, or made in parts, goes on and is summed up as one.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import gc
import json
import multiprocessing
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import sqlalchemy
import torch
from proof_studies.hand_written import HAND_WRITTEN
from proof_studies.planted import PLANTED
from proof_studies.refusal import REFUSAL
from proof_studies.rounding import ROUNDING
from proof_studies.running import Finding
from proof_studies.same import SAME

PARTS = {"aa": SAME, "planted": PLANTED, "rounding": ROUNDING, "refusal": REFUSAL, "verify": HAND_WRITTEN}


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--only", default=None)
    parser.add_argument("--keep", type=Path, default=None)
    options = parser.parse_args(arguments)
    unknown = set(options.parts) - set(PARTS)
    if unknown:
        parser.error(f"no part {', '.join(unknown)}; allowed: {', '.join(PARTS)}")
    for name in options.parts or PARTS:
        first, last = (int(x) for x in options.only.split(":")) if options.only else (0, PARTS[name].num_studies)
        findings = []
        for number, finding in run(name, range(first, last), num_jobs=options.jobs, keep=options.keep):
            print(f"  {name} {number}: {show(finding)}", flush=True)
            findings.append(finding)
        for line in PARTS[name].summary(findings):
            print(line)
        seconds = [finding["cpu_seconds"] for finding in findings]
        print(
            f"{name}: {len(findings)} studies, {sum(seconds):.0f} s of CPU in all, {max(seconds):.1f} s at most",
            flush=True,
        )


def run(name: str, numbers: range, *, num_jobs: int, keep: Path | None) -> Iterator[tuple[int, Finding]]:
    """Yield what each study found, in order; those that `keep` holds are not made again."""
    jobs = [(name, number, keep) for number in numbers]
    if num_jobs == 1:
        prepare()
        yield from zip(numbers, map(one, jobs), strict=True)
        return
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(num_jobs, mp_context=context, initializer=prepare) as pool:
        yield from zip(numbers, pool.map(one, jobs), strict=True)


def prepare() -> None:
    """One thread, no warnings, and databases that nobody needs after a power cut."""
    torch.set_num_threads(1)
    gc.freeze()  # each run collects what it left; what was there before need not be looked through
    warnings.simplefilter("ignore")

    @sqlalchemy.event.listens_for(sqlalchemy.Engine, "connect")
    def without_sync(connection: Any, _: Any) -> None:
        connection.execute("PRAGMA synchronous=OFF")


def one(job: tuple[str, int, Path | None]) -> Finding:
    name, number, keep = job
    path = None if keep is None else keep / f"{name}-{number}.json"
    if path is not None and path.exists():
        return dict(json.loads(path.read_text()))
    started = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        finding = PARTS[name].study(number, Path(folder) / "run")
    finding["cpu_seconds"] = time.process_time() - started
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(finding) + "\n")
    return finding


def show(finding: Finding) -> str:
    return ", ".join(f"{name} {f'{v:.4g}' if isinstance(v, float) else v}" for name, v in finding.items())[:200]


if __name__ == "__main__":
    main(sys.argv[1:])
