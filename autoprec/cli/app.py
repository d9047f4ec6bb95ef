"""The `autoprec` program: its commands, and how an error becomes one line and an exit code."""

from __future__ import annotations

import sys
import traceback
from typing import Annotated

import typer

from autoprec.errors import AutoprecError

__all__ = ["main", "app"]

app = typer.Typer(
    name="autoprec",
    help="Find, prove and apply a per-layer precision policy for a PyTorch training.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help: rich would be most of the time that --help takes
)


@app.callback()
def _options(
    verbose: Annotated[bool, typer.Option("-v", "--verbose", help="Show the traceback of an error.")] = False,
) -> None:
    _State.verbose = verbose


class _State:
    verbose = False


def main() -> None:
    """Run the command line; an error of autoprec is one line on stderr and its exit code."""
    from autoprec.cli import choose, init, search, show, spaces, verify

    for command in (search, verify, choose, show, spaces, init):
        command.register(app)
    try:
        app()
    except AutoprecError as error:
        if _State.verbose:
            traceback.print_exc()
        else:
            print(f"autoprec: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
