"""Print what a short proof tells of a long training: rank correlations, false proofs and false refusals by length.

    python benchmarks/horizon.py [--tasks cnn,vit] [--lengths 28,1200] [--seeds FIRST:LAST] [--policy bf16]
                                 [--keep FOLDER] [--table]

Seven small networks that learn, trained for real in FP32 and under seventeen policies each, to each length anew with
the learning rate falling to zero and with paired seeds; FP16 and BF16 are emulated. It takes over an hour of a core.
`--keep` stores each training's outcome, so that a run that was stopped, or made in parts, goes on and is summed up as
one; `--table` sums up what is kept and trains nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from horizon_parts.policies import FP32, policies_of
from horizon_parts.running import REFERENCE, load_runs, plan_runs, train
from horizon_parts.table import lines
from horizon_parts.tasks import TASKS
from horizon_parts.verdicts import Horizon

from autoprec.search.metric import metric_of

SEEDS = {28: 4, 40: 4, 80: 4, 160: 4, 400: 2, 1_200: 2}
"""Steps of a training, and on how many seeds it is made; the last is the end that the others are held against."""


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", default=",".join(TASKS), help=", ".join(TASKS))
    parser.add_argument("--lengths", default=",".join(map(str, SEEDS)), help="steps")
    parser.add_argument("--seeds", default=None, help="FIRST:LAST of all lengths, instead of each length's own number")
    parser.add_argument("--policy", action="append", default=[], metavar="TEXT", help="those whose name holds it")
    parser.add_argument("--keep", type=Path, default=None)
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args(arguments)
    tasks, lengths = options.tasks.split(","), [int(n) for n in options.lengths.split(",")]
    if unknown := set(tasks) - set(TASKS):
        parser.error(f"no task {', '.join(sorted(unknown))}; allowed: {', '.join(TASKS)}")
    if options.table and options.keep is None:
        parser.error("--table sums up what is kept: name the folder with --keep")
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        if not options.table:
            for n in lengths:
                first, last = (int(x) for x in options.seeds.split(":")) if options.seeds else (0, SEEDS.get(n, 2))
                train_all(tasks, n, range(first, last), folder, options.policy)
        runs = load_runs(folder)
    metrics = {name: metric_of(TASKS[name]()) for name in dict.fromkeys(run["task"] for run in runs)}
    seconds = sum(run["cpu_seconds"] for run in runs)
    print(f"{len(runs)} trainings, {seconds:.0f} s of CPU in all")
    for line in lines(Horizon(runs, metrics), lengths):
        print(line)


def train_all(tasks: Sequence[str], num_steps: int, seeds: range, folder: Path, policies: Sequence[str]) -> None:
    """Train whatever `folder` does not hold yet; one thread, in this process."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    folder.mkdir(parents=True, exist_ok=True)
    for task in tasks:
        built = TASKS[task]()
        for run in plan_runs(task, num_steps, seeds, only=policies):
            path = run.path(folder)
            if path.exists():
                continue
            started = time.process_time()
            found = train(run, built, FP32 if run.policy == REFERENCE else policies_of(task)[run.policy])
            path.write_text(json.dumps({**found, "cpu_seconds": time.process_time() - started}) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
