"""What trials and searches survive, tried out: kills, hangs, crashes, full disks, NaN. Prints one figure a promise.

    python benchmarks/survival.py                            # all of it; up to 20 minutes on one core
    python benchmarks/survival.py chaos --kills 20           # one part, smaller

The networks are cheap, the processes, kills, files and databases are real. Linux: a full disk is a tmpfs of
512 KiB where one may be mounted, else a limit on the size of files.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

from survival_parts.chaos import chaos
from survival_parts.ends import ends
from survival_parts.endurance import endurance, nan
from survival_parts.files import files
from survival_parts.killed_search import search_as_a_program
from survival_parts.times import times


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


if __name__ == "__main__":
    main()
