"""A whole `autoprec search` on the device, as a user would start it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from typing import Any

from gpu_parts import Context

__all__ = ["search"]

PROGRAM = "from autoprec.cli import main; main()"
MAX_SECONDS = 300.0
GRACE_SECONDS = 20.0


def search(context: Context) -> dict[str, Any]:
    """Run the search in at most five minutes; what it recommends is in the JSON with its numbers."""
    what = ["--model", "mlp", "--n-trials", "6"] if context.quick else ["--model", "resnet50", "--n-trials", "12"]
    folder = context.folder / "search"
    command = ["search", *what, "--device", str(context.device), "--format", "json", "-o", str(folder)]
    limit = min(MAX_SECONDS, context.seconds_left - GRACE_SECONDS)
    start = time.monotonic()
    process = subprocess.Popen([sys.executable, "-c", PROGRAM, *command], stdout=subprocess.PIPE, text=True)
    try:
        output, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=GRACE_SECONDS)
    seconds = time.monotonic() - start
    result: dict[str, Any] = {
        "command": f"autoprec {' '.join(what)}",
        "seconds": seconds,
        "exit_code": process.returncode,
    }
    if process.returncode in (0, 3):
        result |= json.loads(output)
        result.pop("files", None)
    sentence = result.get("recommendation", {}).get("sentence", "no recommendation")
    print(f"\nautoprec {' '.join(command[:5])}: {seconds:.0f} s, exit {process.returncode}\n{sentence}", flush=True)
    return result
