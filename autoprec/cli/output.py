"""What all commands share of reading and printing: exit codes, formats, the console, sizes; loads nothing heavy."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autoprec.cli.logs import is_quiet
from autoprec.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    from rich.console import Console

    from autoprec.policy import Policy

__all__ = [
    "FORMATS",
    "INCONCLUSIVE",
    "INTERRUPTED",
    "NO_FIT",
    "POLICY_FILE",
    "WORSE",
    "check_folder",
    "check_format",
    "open_console",
    "parse_memory",
    "print_json",
    "read_policy",
]

WORSE = 1
INCONCLUSIVE = 3
NO_FIT = 4
INTERRUPTED = 130

POLICY_FILE = "policy.json"
"""What the folder of a search calls its policy."""
FORMATS = ("text", "json")
PLAIN_WIDTH = 120
"""Width of tables where the output is not a terminal."""


def check_format(name: str) -> None:
    """Raise UsageError for an output format that does not exist."""
    if name not in FORMATS:
        raise UsageError(f"format {name!r}; allowed: {', '.join(FORMATS)}{did_you_mean(name, FORMATS)}")


def check_folder(path: Path | None) -> None:
    """Refuse an output folder that cannot be made, before there is anything to write into it.

    A working folder that somebody has removed is left for the root: oneMKL ends a process that loads it there.

    Raises:
        UsageError: a file is in its way, or it would lie in a working folder that is gone.
        OSError: its name is too long.
    """
    try:
        os.getcwd()
    except FileNotFoundError:
        if path is None or not path.is_absolute():
            raise UsageError(
                "the working folder is not there any more; go to another one, or give -o /WHOLE/PATH"
            ) from None
        os.chdir("/")
    if path is None:
        return
    there = next(each for each in (path, *path.parents, Path("/")) if each.exists())
    if not there.is_dir():
        raise UsageError(f"-o {path}: {there.name} is a file; a folder is needed")


def open_console(*, to_stderr: bool = False, for_progress: bool = False) -> Console:
    """Return a console that colours nothing by itself; one for progress is silent under `-q`."""
    from rich.console import Console

    quiet = for_progress and is_quiet()
    console = Console(stderr=to_stderr, highlight=False, emoji=False, quiet=quiet)
    if not console.is_terminal:
        console = Console(stderr=to_stderr, highlight=False, emoji=False, quiet=quiet, width=PLAIN_WIDTH)
    return console


def read_policy(place: Path) -> Policy:
    """Read a policy file, or the policy in the folder of a search.

    Raises:
        PolicyError: no such file, or no policy.
    """
    from autoprec.policy import load_policy

    return load_policy(place / POLICY_FILE if place.is_dir() else place)


def print_json(document: Mapping[str, Any]) -> None:
    """Print one strict JSON document on stdout."""
    import json

    print(json.dumps(document, indent=2, allow_nan=False))


MEMORY_UNITS = {"MB": 1e6, "GB": 1e9, "TB": 1e12, "MiB": 2.0**20, "GiB": 2.0**30, "TiB": 2.0**40}


def parse_memory(text: str | None) -> float | None:
    """Return the bytes of "12GB" or "11.5 GiB"; None stays None.

    Raises:
        UsageError: no positive number with a unit.
    """
    if text is None:
        return None
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*", text)
    units = {name.lower(): size for name, size in MEMORY_UNITS.items()}
    if found is None or found[2].lower() not in units or float(found[1]) <= 0:
        raise UsageError(f"memory {text!r}; a number above 0 with a unit is needed: 12GB ({', '.join(MEMORY_UNITS)})")
    return float(found[1]) * units[found[2].lower()]
