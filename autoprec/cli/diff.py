"""`autoprec diff A B`: what differs between two policies: units, scaler, optimizer, numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from autoprec.cli.output import check_format, open_console, print_json, read_policy

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    app.command("diff", help="Compare two policies: units, scaler, optimizer, numbers; nothing is run.")(_diff)


def _diff(
    first: Annotated[Path, typer.Argument(help="A policy.json, or the folder of a search.")],
    second: Annotated[Path, typer.Argument(help="The other.")],
    format: Annotated[str, typer.Option("--format", help="text or json.")] = "text",
) -> None:
    check_format(format)
    from autoprec.policy import compare_policies

    found = compare_policies(read_policy(first), read_policy(second))
    if format == "json":
        print_json({field: _pairs(getattr(found, field)) for field in ("rules", "units", "settings", "numbers")})
        return
    from autoprec.report.tables import difference_table

    if found.is_empty:
        print("the policies say the same")
        return
    names = (str(first), str(second)) if first != second else ("first", "second")
    open_console().print(difference_table(found, names=names))


def _pairs(pairs: Any) -> dict[str, list[Any]]:
    return {key: [_plain(value) for value in pair] for key, pair in pairs.items()}


def _plain(value: Any) -> Any:
    return value.model_dump(mode="json", exclude_none=True) if hasattr(value, "model_dump") else value
