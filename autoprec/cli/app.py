"""The `autoprec` program: its commands, and how an error becomes one line and an exit code."""

from __future__ import annotations

import contextlib
import errno
import functools
import importlib
import inspect
import logging
import os
import re
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
    """Run the command line; an error of autoprec, of the system or of a number is one line and an exit code."""
    if not app.registered_commands:
        for command in COMMANDS:
            importlib.import_module(f"autoprec.cli.{command}").register(app)
        for info in app.registered_commands:
            assert info.callback is not None
            info.callback = _also_after(info.callback)
    with logging_to_stderr() as log:
        try:
            _check_arguments()
            try:
                app()
            finally:
                sys.stdout.flush()  # what cannot be written any more is told now, not when Python ends
        except BrokenPipeError:
            _drop_stdout()
            sys.exit(1)
        except (AutoprecError, OSError, OverflowError, RecursionError, UnicodeError) as error:
            from autoprec.report.escaping import printable

            if log.isEnabledFor(logging.DEBUG):
                traceback.print_exc()
            else:
                print(printable(f"autoprec: {_line(error)}"), file=sys.stderr)
            _drop_stdout()
            sys.exit(_exit_code(error))


def _check_arguments() -> None:
    """Refuse what no command can take: bytes that are no text, which neither a file nor a terminal takes, and nothing.

    Typer makes the working folder of an empty path.

    Raises:
        UsageError: the argument is named.
    """
    for number, argument in enumerate(sys.argv[1:], start=1):
        if not argument:
            after = f", after {sys.argv[number - 1][:80]}" if number > 1 else ""
            raise UsageError(f"argument {number}{after}: it is empty; leave it out, or give a value")
        if re.fullmatch(r"--[a-z][a-z-]*=", argument):
            raise UsageError(f"argument {number}, {argument[:80]}: its value is empty; leave it out, or give one")
        try:
            argument.encode()
        except UnicodeEncodeError:
            raise UsageError(f"argument {number}, {argument[:80]!r}: not UTF-8 text") from None


def _line(error: BaseException) -> str:
    if isinstance(error, AutoprecError):
        return str(error)
    if isinstance(error, OSError):
        place = f"{str(error.filename)[:200]}: " if error.filename else ""
        return f"{place}{error.strerror or type(error).__name__}"
    if isinstance(error, OverflowError):
        return f"a number is too large ({error})"
    if isinstance(error, RecursionError):
        return "something is nested too deep to be followed (names, containers or modules inside each other)"
    return f"text that is not UTF-8 ({error})"


MISTAKEN = (
    errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.EACCES, errno.EPERM,
    errno.EROFS, errno.ELOOP, errno.EINVAL,
)  # fmt: skip
"""What the system says of a path that a person gave."""


def _exit_code(error: BaseException) -> int:
    if isinstance(error, AutoprecError):
        return error.exit_code
    is_usage = isinstance(error, OverflowError | UnicodeError) or (
        isinstance(error, OSError) and error.errno in MISTAKEN and error.filename is not None
    )
    return UsageError.exit_code if is_usage else 1


def _drop_stdout() -> None:
    """Let what a full or closed output has not taken go: Python would try again when it ends, and say so."""
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
