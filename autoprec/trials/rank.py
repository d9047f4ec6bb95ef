"""One process of a trial on several GPUs: `torchrun -m autoprec.trials.rank FOLDER`, started by `group.py`.

FOLDER holds `request.json`; each process leaves `outcome-RANK.json` there. A trial that did not end well ends the
process with an error, so that torchrun stops the others, which would wait for it for ever.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from autoprec.policy import write_atomically

__all__ = ["main", "run_rank"]


def main(folder: Path) -> int:
    """Run this process's part of the trial; return the exit code."""
    from autoprec.trials.process import guard_group

    request = json.loads((folder / "request.json").read_text())
    guard_group(request["search_pid"], os.getppid())  # torchrun leads a group; the kernel ends this process with it
    if request["settings"]["device"].startswith("cuda"):
        _see_one_gpu(int(os.environ["LOCAL_RANK"]))
    answer = run_rank(request, init_method="env://", rank=int(os.environ["RANK"]))
    write_atomically(folder / f"outcome-{os.environ['RANK']}.json", json.dumps(answer, allow_nan=False))
    return 0 if answer.get("outcome", {}).get("kind") == "ok" else 1


def run_rank(request: dict[str, Any], *, init_method: str, rank: int) -> dict[str, Any]:
    """Join the group, build the task and run the trial; return {"outcome": ...} or {"error": message}."""
    import torch
    import torch.distributed as dist

    from autoprec.errors import AutoprecError
    from autoprec.policy import Policy
    from autoprec.tasks.source import TaskSource
    from autoprec.trials.failures import describe, format_traceback
    from autoprec.trials.outcome import TrialSettings
    from autoprec.trials.runner import run_trial

    settings = TrialSettings.model_validate(request["settings"])
    torch.set_num_threads(request["num_threads"])
    backend = "nccl" if settings.device.startswith("cuda") else "gloo"
    dist.init_process_group(backend, init_method=init_method, rank=rank, world_size=settings.num_processes)
    try:
        task = TaskSource(**request["source"]).build()
        outcome = run_trial(task, Policy.from_json(request["policy"]), settings)
    except AutoprecError as error:
        return {"error": str(error)}
    except Exception as error:
        return {"error": f"{describe(error)}\n{format_traceback(error)}"}
    if outcome.is_ok:
        dist.destroy_process_group()
    return {"outcome": outcome.model_dump(mode="json")}


def _see_one_gpu(local_rank: int) -> None:
    """Let this process see its own GPU alone, so that it is `cuda` here as in a trial on one."""
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    os.environ["CUDA_VISIBLE_DEVICES"] = visible[local_rank] if visible else str(local_rank)


if __name__ == "__main__":
    code = main(Path(sys.argv[1]))
    sys.stderr.flush()
    if code:
        os._exit(code)  # what is left of the group must not wait for the others
