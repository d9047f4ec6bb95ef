"""Worker processes on one study, with trials that sleep: reads a line such as `{"storage": ..., ...}` for each study.

All is imported once, then each worker is forked: it is there at once. Prints the processes' numbers as one JSON line,
then what each ended with, as another; what they say on standard error is in `told.txt` in the study's folder.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from toys import Chain, FakeMeasure, tiny_plan, tiny_task

from autoprec.policy import Policy
from autoprec.search.workers import run_worker
from autoprec.trials.outcome import Outcome, TrialSettings


class SleepingMeasure(FakeMeasure):
    """Writes a line for each trial that it begins, and takes as long as it is told."""

    def __init__(self, log: Path, seconds: float) -> None:
        super().__init__(noise=0.001)
        self._log, self._seconds = log, seconds

    def __call__(self, policy: Policy, settings: TrialSettings) -> Outcome:
        with self._log.open("a") as file:
            file.write(f"{os.getpid()} {json.dumps(json.loads(policy.to_json()))}\n")
        time.sleep(self._seconds)
        return super().__call__(policy, settings)


def main() -> None:
    for line in sys.stdin:
        run(json.loads(line))


def run(given: dict[str, Any]) -> None:
    folder = Path(given["folder"])
    settings = {
        "storage": given["storage"],
        "study_name": given.get("study_name", "shared"),
        "heartbeat_seconds": given.get("heartbeat", 10),
    }
    plan = tiny_plan(folder, task=tiny_task(model=Chain), sampler=given.get("sampler", "policy"), **settings)
    numbers = []
    for _ in range(given["workers"]):
        number = os.fork()
        if number == 0:
            code = 1
            try:
                with (folder / "told.txt").open("a") as told:
                    os.dup2(told.fileno(), sys.stderr.fileno())
                measure = SleepingMeasure(folder / "begun.txt", given["seconds"])
                run_worker(plan, measure, n_trials=given["n_trials"])
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        numbers.append(number)
    print(json.dumps(numbers), flush=True)
    ended = {number: os.waitstatus_to_exitcode(os.waitpid(number, 0)[1]) for number in numbers}
    print(json.dumps(ended), flush=True)


if __name__ == "__main__":
    main()
