"""The `autoprec` program: its commands, and how an error becomes one line and an exit code."""

from __future__ import annotations

import importlib
import logging
import sys
import traceback
from typing import Annotated

import typer

from autoprec.cli.logs import logging_to_stderr
from autoprec.errors import AutoprecError, UsageError

__all__ = ["COMMANDS", "main", "app"]

COMMANDS = (
    "search",
    "verify",
    "choose",
    "show",
    "diff",
    "check",
    "estimate",
    "doctor",
    "spaces",
    "init",
)
"""In the order of the help; each is a module of this package."""

app = typer.Typer(
    name="autoprec",
    help="Find, prove and apply a per-layer precision policy for a PyTorch training.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help: rich would be most of the time that --help takes
)


@app.callback()
def _options(
    verbose: Annotated[
        bool, typer.Option("-v", "--verbose", help="Log what is done, and show the traceback of an error.")
    ] = False,
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="No progress and no warnings; results alone.")] = False,
) -> None:
    if verbose and quiet:
        raise UsageError("-v and -q contradict each other; give one of them")
    level = logging.DEBUG if verbose else logging.ERROR if quiet else logging.WARNING
    logging.getLogger("autoprec").setLevel(level)


def main() -> None:
    """Run the command line; an error of autoprec is one line on stderr and its exit code."""
    if not app.registered_commands:
        for command in COMMANDS:
            importlib.import_module(f"autoprec.cli.{command}").register(app)
    with logging_to_stderr() as log:
        try:
            app()
        except AutoprecError as error:
            from autoprec.report.escaping import printable

            if log.isEnabledFor(logging.DEBUG):
                traceback.print_exc()
            else:
                print(printable(f"autoprec: {error}"), file=sys.stderr)
            sys.exit(error.exit_code)
