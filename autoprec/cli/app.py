"""The `autoprec` program: its commands, and how an error becomes one line and an exit code."""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import sys
import traceback
from collections.abc import Callable
from typing import Annotated, Any, get_type_hints

import typer

from autoprec.cli.logs import logging_to_stderr
from autoprec.errors import AutoprecError, UsageError

__all__ = ["COMMANDS", "main", "app"]

COMMANDS = (
    "search",
    "worker",
    "verify",
    "choose",
    "show",
    "report",
    "dashboard",
    "diff",
    "check",
    "export",
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


_Verbose = Annotated[
    bool, typer.Option("-v", "--verbose", help="Log what is done, and show the traceback of an error.")
]
_Quiet = Annotated[bool, typer.Option("-q", "--quiet", help="No progress and no warnings; results alone.")]


@app.callback()
def _options(verbose: _Verbose = False, quiet: _Quiet = False) -> None:
    _set_level(verbose, quiet)


def _set_level(verbose: bool, quiet: bool) -> None:
    if verbose and quiet:
        raise UsageError("-v and -q contradict each other; give one of them")
    level = logging.DEBUG if verbose else logging.ERROR if quiet else logging.WARNING
    logging.getLogger("autoprec").setLevel(level)


def _also_after(command: Callable[..., None]) -> Callable[..., None]:
    """Let a command take `-v` and `-q`, too: `autoprec -v search` and `autoprec search -v` are the same."""

    @functools.wraps(command)
    def with_level(*arguments: Any, verbose: bool, quiet: bool, **options: Any) -> None:
        if verbose or quiet:
            _set_level(verbose, quiet)
        command(*arguments, **options)

    added = {"verbose": _Verbose, "quiet": _Quiet}
    hints = {**get_type_hints(command, include_extras=True), **added}
    own = [p.replace(annotation=hints[p.name]) for p in inspect.signature(command).parameters.values()]
    more = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=hints[name]) for name in added
    ]
    with_level.__signature__ = inspect.Signature([*own, *more])  # type: ignore[attr-defined]
    with_level.__annotations__ = hints
    return with_level


def main() -> None:
    """Run the command line; an error of autoprec is one line on stderr and its exit code."""
    if not app.registered_commands:
        for command in COMMANDS:
            importlib.import_module(f"autoprec.cli.{command}").register(app)
        for info in app.registered_commands:
            assert info.callback is not None
            info.callback = _also_after(info.callback)
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
