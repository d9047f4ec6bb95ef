"""`autoprec show FILE`: what a policy or a front says, and what stands behind it: numbers, evidence, the model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autoprec.cli.output import POLICY_FILE, check_format, open_console, print_json
from autoprec.errors import UsageError

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    app.command("show", help="Show a policy, a front or the folder of a search: numbers, evidence, units.")(_show)


def _show(
    file: Annotated[Path | None, typer.Argument(help="A policy.json, a front.json, or the folder of a search.")] = None,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON Schema of a policy instead.")] = False,
    format: Annotated[str, typer.Option("--format", help="text or json.")] = "text",
) -> None:
    check_format(format)
    if schema == (file is not None):
        raise UsageError("show takes a file or folder, or --schema: one of the two")
    if file is None:
        _show_schema()
        return
    if file.is_dir():
        _show_front(file / "front.json", format=format)
        if format == "text":
            _show_policy(file / POLICY_FILE, format=format)
        return
    data = _read(file)
    if _is_front(data):
        _show_front(file, format=format, data=data)
    else:
        _show_policy(file, format=format, data=data)


def _show_schema() -> None:
    from autoprec.policy import Policy

    schema = "https://json-schema.org/draft/2020-12/schema"
    print_json({"$schema": schema, **Policy.model_json_schema()})


def _read(path: Path) -> bytes | None:
    """Read a file, once: a pipe has nothing for a second reader. None for one that the policy's own errors tell of."""
    from autoprec.policy.strict_json import MAX_FILE_BYTES

    try:
        with path.open("rb") as opened:
            return opened.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError):
        return None


def _is_front(data: bytes | None) -> bool:
    """Whether a file holds a front; what is no JSON object at all is left to the policy's own errors."""
    import json

    try:
        found = json.loads(data or b"")
    except (ValueError, RecursionError):
        return False
    return isinstance(found, dict) and "front" in found


def _show_front(path: Path, *, format: str, data: bytes | None = None) -> None:
    from autoprec.report.escaping import escaped
    from autoprec.report.front import front_table
    from autoprec.search.front import read_front

    front = read_front(path, data=data)
    if format == "json":
        print(front.to_json(), end="")
        return
    console = open_console()
    console.print(front_table(front))
    console.print(escaped(front.sentence), soft_wrap=True)


def _show_policy(path: Path, *, format: str, data: bytes | None = None) -> None:
    from autoprec.policy import Policy, load_policy
    from autoprec.report.escaping import escaped
    from autoprec.report.tables import comparison_table, evidence_lines, unit_tree

    found = load_policy(path) if data is None else Policy.from_json(data, where=path.name)
    if format == "json":
        print(found.to_json(), end="")
        return
    console = open_console()
    if found.recommendation is not None:
        console.print(escaped(found.recommendation.sentence), soft_wrap=True)
    for line in evidence_lines(found):
        console.print(escaped(line), soft_wrap=True)
    if found.evidence is not None and found.evidence.arms:
        verified = found.evidence.verification
        metric = "accuracy" if verified is None else verified.metric
        reference = found.evidence.compared_with or "fp32"
        console.print(comparison_table(found.evidence.arms, metric=metric, reference=reference))
    console.print(unit_tree(found, title=found.model.name if found.model is not None else path.name))
