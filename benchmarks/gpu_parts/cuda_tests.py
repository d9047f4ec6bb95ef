"""The tests that are marked `cuda`; on a CPU they are collected and skipped, which shows at least that they load."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from gpu_parts import Context

__all__ = ["run_cuda_tests"]

ROOT = Path(__file__).resolve().parents[2]


def run_cuda_tests(context: Context) -> dict[str, Any]:
    command = [sys.executable, "-m", "pytest", "-m", "cuda", "-q", "-p", "no:cacheprovider", str(ROOT / "tests")]
    limit = max(10.0, context.seconds_left)
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=limit, cwd=ROOT, check=False)
    except subprocess.TimeoutExpired:
        print("\ntests marked cuda: not over in time")
        return {"exit_code": None}
    summary = ended.stdout.strip().splitlines()[-1:] or [""]
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", ended.stdout, re.MULTILINE)
    print(f"\ntests marked cuda: {summary[0]}", *failed, sep="\n  ", flush=True)
    return {"exit_code": ended.returncode, "summary": summary[0], "failed": failed}
