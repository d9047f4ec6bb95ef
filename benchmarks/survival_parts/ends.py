"""Every kind of end of a trial, and the trial after it."""

from __future__ import annotations

from typing import Any

from autoprec.policy import Policy
from survival_parts.killed_search import TASKS, short

FP32, BF16 = Policy(default="fp32"), Policy(default="autocast", dtype="bf16")


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
