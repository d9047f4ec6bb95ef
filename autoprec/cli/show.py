"""`autoprec show FILE`: what a policy or a front says, and what stands behind it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autoprec.cli.output import check_format, open_console

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    app.command("show", help="Show a policy, a front or the folder of a search: numbers, evidence, units.")(_show)


def _show(
    file: Annotated[Path, typer.Argument(help="A policy.json, a front.json, or the folder of a search.")],
    format: Annotated[str, typer.Option("--format", help="text or json.")] = "text",
) -> None:
    check_format(format)
    if file.is_dir():
        _show_front(file / "front.json", format=format)
        if format == "text":
            _show_policy(file / "policy.json", format=format)
    elif _is_front(file):
        _show_front(file, format=format)
    else:
        _show_policy(file, format=format)


def _is_front(path: Path) -> bool:
    """Whether a file holds a front; what is no JSON object at all is left to the policy's own errors."""
    import json

    from autoprec.policy.strict_json import MAX_FILE_BYTES

    try:
        with path.open("rb") as opened:
            data = json.loads(opened.read(MAX_FILE_BYTES))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(data, dict) and "front" in data


def _show_front(path: Path, *, format: str) -> None:
    from rich.markup import escape

    from autoprec.report.front import front_table
    from autoprec.search.front import read_front

    front = read_front(path)
    if format == "json":
        print(front.to_json(), end="")
        return
    console = open_console()
    console.print(front_table(front))
    console.print(escape(front.sentence), soft_wrap=True)


def _show_policy(path: Path, *, format: str) -> None:
    from rich.markup import escape

    from autoprec.policy import load_policy
    from autoprec.report.tables import comparison_table, evidence_lines, unit_tree

    found = load_policy(path)
    if format == "json":
        print(found.to_json(), end="")
        return
    console = open_console()
    if found.recommendation is not None:
        console.print(escape(found.recommendation.sentence), soft_wrap=True)
    for line in evidence_lines(found):
        console.print(escape(line), soft_wrap=True)
    if found.evidence is not None and found.evidence.arms:
        console.print(comparison_table(found.evidence.arms))
    console.print(unit_tree(found, title=found.model.name if found.model is not None else path.name))
