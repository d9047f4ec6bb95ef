"""`autoprec show POLICY`: what a policy says, module by module, and what stands behind it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autoprec.cli.output import check_format, open_console

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    app.command("show", help="Show a policy: summary, evidence and the precision of each unit.")(_show)


def _show(
    policy: Annotated[Path, typer.Argument(help="A policy.json.")],
    format: Annotated[str, typer.Option("--format", help="text or json.")] = "text",
) -> None:
    from rich.markup import escape

    from autoprec.policy import load_policy
    from autoprec.report.tables import comparison_table, evidence_lines, unit_tree

    check_format(format)
    found = load_policy(policy)
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
    console.print(unit_tree(found, title=found.model.name if found.model is not None else policy.name))
