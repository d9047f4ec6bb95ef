"""`autoprec spaces [NAME]`: the search spaces that come along, and what one of them says."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from autoprec.cli.output import check_format, open_console

if TYPE_CHECKING:
    from autoprec.search.space import Range, SearchSpace

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    app.command("spaces", help="List the search spaces that come along, or explain one.")(_spaces)


def _spaces(
    space: Annotated[str | None, typer.Argument(help="A search space by name, or a TOML file.")] = None,
    format: Annotated[str, typer.Option("--format", help="text or json.")] = "text",
) -> None:
    import json

    from autoprec.search.space import builtin_spaces, load_space

    check_format(format)
    shown = [load_space(name) for name in ([space] if space is not None else builtin_spaces())]
    if format == "json":
        documents = [one.model_dump(mode="json", exclude_defaults=True) for one in shown]
        print(json.dumps(documents if space is None else documents[0], indent=2, allow_nan=False))
    elif space is not None:
        _explain(shown[0])
    else:
        _list(shown)


def _list(spaces: list[SearchSpace]) -> None:
    from rich.table import Table

    from autoprec.report.escaping import escaped

    table = Table(title="Search spaces: --space NAME, or a TOML file of your own that inherits from one")
    table.add_column("name", no_wrap=True)
    table.add_column("what it decides")
    for space in spaces:
        table.add_row(escaped(space.name), escaped(space.description))
    open_console().print(table)


def _explain(space: SearchSpace) -> None:
    from autoprec.report.escaping import escaped

    lines = [
        f"{space.name}: {space.description}",
        f"granularity {space.granularity}; repeated blocks {space.repeats}; choices {', '.join(space.choices)}",
        *([f"go with the layer before them: {', '.join(space.followers)}"] if space.followers else []),
    ]
    for rule in space.rules:
        says = [f"only {', '.join(rule.choices)}"] if rule.choices else []
        says += [f"start from {rule.start}"] if rule.start is not None else []
        lines.append(f"{', '.join([*rule.names, *rule.types])}: {'; '.join(says)} ({rule.reason})")
    for group, ranges in (("grad_scaler", space.grad_scaler), ("optimizer", space.optimizer)):
        for name in type(ranges).model_fields:
            if (allowed := getattr(ranges, name)) is not None:
                lines.append(f"{group}/{name}: {_shown(allowed)}")
    console = open_console()
    for line in lines:
        console.print(escaped(line), soft_wrap=True)


def _shown(allowed: Range) -> str:
    if allowed.choices is not None:
        return ", ".join(f"{choice:g}" if isinstance(choice, float) else str(choice) for choice in allowed.choices)
    return f"{allowed.low:g} to {allowed.high:g}{', logarithmic' if allowed.log else ''}"
