"""`autoprec choose RUN`: recommend again from what a search proved, for another preference or memory budget."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autoprec.cli.output import INCONCLUSIVE, check_format, open_console, parse_memory

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    app.command("choose", help="Choose again among what a search proved; nothing is run.")(_choose)


def _choose(
    run: Annotated[Path, typer.Argument(help="The folder of a search, or its front.json.")],
    prefer: Annotated[str | None, typer.Option("--prefer", help="balanced, fastest or smallest.")] = None,
    memory_budget: Annotated[
        str | None, typer.Option("--memory-budget", help="Recommend nothing that needs more, such as 12GB.")
    ] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write the policy to this file.")] = None,
    format: Annotated[str, typer.Option("--format", help="text or json.")] = "text",
) -> None:
    from autoprec.policy import load_policy
    from autoprec.report.escaping import escaped
    from autoprec.report.front import front_table
    from autoprec.search.export import rechosen_policy
    from autoprec.search.front import read_front
    from autoprec.search.worth import as_preference

    check_format(format)
    budget = parse_memory(memory_budget)
    path = run / "front.json" if run.is_dir() else run
    front = read_front(path)
    choice = front.choose(prefer=front.prefer if prefer is None else as_preference(prefer), memory_budget_bytes=budget)
    policy = rechosen_policy(load_policy(path.parent / "policy.json"), choice)
    if output is not None:
        policy.save(output)
    if format == "json":
        print(policy.to_json(), end="")
    else:
        console = open_console()
        console.print(front_table(front, chosen=choice.name))
        console.print(escaped(choice.sentence), soft_wrap=True)
        if output is not None:
            console.print(escaped(f"written: {output}"), soft_wrap=True)
    raise typer.Exit(INCONCLUSIVE if choice.kind == "inconclusive" else 0)
