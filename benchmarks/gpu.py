"""Everything that has to be measured on a GPU, in one command that fits itself into the minutes it is given.

    python benchmarks/gpu.py                         # on a CUDA machine, 9 minutes
    python benchmarks/gpu.py --device cpu --quick    # proves the script; its figures say nothing about a GPU

Parts, the most important first: step time and memory (eager), memory model, tests marked `cuda`, a whole search,
emulation against CUDA, faults, overhead, step time compiled. A part that no longer fits is left out, and said so.
Tables are printed as they come; the JSON is written after each part, so that an interrupted run still counts. Needs no
network and no build step: torch 2.11 to 2.14 with its torchvision, and autoprec's few wheels (docs/gpu.md names them).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import torchvision
from gpu_parts import Context, Part
from gpu_parts.cuda_tests import run_cuda_tests
from gpu_parts.emulating import compare_emulation
from gpu_parts.faults import inject_faults
from gpu_parts.memory import compare_memory
from gpu_parts.networks import NETWORKS
from gpu_parts.overhead import compare_overhead
from gpu_parts.searching import search
from gpu_parts.steps import measure_compiled, measure_eager

import autoprec
from autoprec.policy import write_atomically

PARTS = (
    Part("eager", "step time and memory, eager", measure_eager, seconds=100, minimum=40),
    Part("memory", "memory model", compare_memory, seconds=40, minimum=20),
    Part("tests", "tests marked cuda", run_cuda_tests, seconds=60, minimum=30),
    Part("search", "a whole search", search, seconds=200, minimum=120),
    Part("emulation", "emulation against CUDA", compare_emulation, seconds=30, minimum=15),
    Part("faults", "faults and the trial after them", inject_faults, seconds=40, minimum=25),
    Part("overhead", "overhead of an installed policy", compare_overhead, seconds=15, minimum=10),
    Part("compiled", "step time and memory, compiled", measure_compiled, seconds=150, minimum=60),
)


def environment(device: torch.device) -> dict[str, Any]:
    details: dict[str, Any] = {
        "torch": torch.__version__,
        "torchvision": torchvision.__version__,
        "autoprec": autoprec.__version__,
        "python": platform.python_version(),
        "device": device.type,
        "date": time.strftime("%Y-%m-%d"),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        details |= {
            "gpu": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "memory_bytes": properties.total_memory,
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "driver": _driver(),
            "allow_fp16_reduced_precision_reduction": str(
                torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction
            ),
        }
    return details


def _driver() -> str | None:
    with contextlib.suppress(OSError):
        first = Path("/proc/driver/nvidia/version").read_text().splitlines()[0]
        return next((word for word in first.split() if word[:1].isdigit() and "." in word), None)
    return None


def run(parts: list[Part], context: Context, report: dict[str, Any], output: Path) -> bool:
    """Run the parts that fit, one after the other; return whether none of them failed."""
    context.results = report["results"]
    for part in parts:
        if not context.quick and context.seconds_left < part.minimum:
            report["left_out"].append(part.name)
            print(f"\n{part.title}: left out, {context.seconds_left:.0f} s are left")
            continue
        start = time.monotonic()
        try:
            report["results"][part.name] = part.run(context)
        except Exception:
            traceback.print_exc()
            report["failed"].append(part.name)
        report["seconds"][part.name] = time.monotonic() - start
        write_atomically(output, json.dumps(report, indent=2, allow_nan=False) + os.linesep)
    return not report["failed"]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--minutes", type=float, default=9.0, help="what the whole run may take (default 9)")
    parser.add_argument("--quick", action="store_true", help="tiny shapes and few rounds, every part; so on a CPU")
    parser.add_argument("--parts", nargs="+", choices=[part.name for part in PARTS], help="only these")
    parser.add_argument("--models", nargs="+", default=list(NETWORKS), choices=list(NETWORKS))
    parser.add_argument("--rounds", type=int, help="interleaved rounds (default 15, 2 with --quick)")
    parser.add_argument("--policy", action="append", default=[], metavar="MODEL=FILE", help="policy.json of a search")
    parser.add_argument("--output", type=Path, default=Path("gpu.json"))
    args = parser.parse_args()
    args.device = torch.device(args.device)
    if args.device.type == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device is there; --device cpu --quick proves the script")
    if args.device.type not in ("cpu", "cuda"):
        parser.error(f"device {args.device}: cpu or cuda")
    args.quick = args.quick or args.device.type == "cpu"
    args.policies = {name: network.policy for name, network in NETWORKS.items()}
    for text in args.policy:
        name, _, path = text.partition("=")
        if name not in NETWORKS or not path:
            parser.error(f"--policy {text}: MODEL=FILE with one of {', '.join(NETWORKS)}")
        args.policies[name] = autoprec.load_policy(path)
    return args


def main() -> None:
    args = parse()
    context = Context(
        device=args.device,
        quick=args.quick,
        deadline=time.monotonic() + 60 * args.minutes,
        policies=args.policies,
        models=args.models,
        rounds=args.rounds or (2 if args.quick else 15),
        folder=args.output.resolve().parent,
    )
    parts = [part for part in PARTS if args.parts is None or part.name in args.parts]
    report: dict[str, Any] = {
        "environment": environment(args.device),
        "results": {},
        "seconds": {},
        "left_out": [],
        "failed": [],
    }
    print(json.dumps(report["environment"]))
    print(f"plan: {', '.join(f'{part.name} {part.seconds:.0f} s' for part in parts)}; {args.minutes:g} minutes in all")
    passed = run(parts, context, report, args.output)
    total = sum(report["seconds"].values())
    print(f"\n{total:.0f} s; left out: {report['left_out'] or 'none'}; failed: {report['failed'] or 'none'}")
    print(f"written to {args.output.name}")
    sys.exit(0 if passed else 1)


if __name__ == "__main__":
    main()
