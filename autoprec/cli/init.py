"""`autoprec init`: write a commented starting file for a task of one's own, which runs as it stands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autoprec.errors import UsageError, did_you_mean

__all__ = ["register", "starters"]

SUMMARIES = {
    "vision": "a convolutional network on images",
    "text": "a transformer over bytes",
    "loop": "for a training loop of your own",
}


def register(app: typer.Typer) -> None:
    app.command("init", help="Write a starting file for a training of your own; it runs as it stands.")(_init)


def starters() -> dict[str, Path]:
    """Return the starting files that come with autoprec, by kind."""
    package = Path(__file__).resolve().parents[1]
    folder = next((f for f in (package / "starters", package.parent / "starters") if f.is_dir()), None)
    return {} if folder is None else {path.stem: path for path in sorted(folder.glob("*.py"))}


def _init(
    kind: Annotated[
        str, typer.Argument(help="; ".join(f"{kind}: {summary}" for kind, summary in SUMMARIES.items()))
    ] = "vision",
    output: Annotated[Path | None, typer.Option("-o", "--output", help="The file to write; <kind>.py.")] = None,
) -> None:
    known = starters()
    if kind not in known:
        raise UsageError(f"init {kind!r}; allowed: {', '.join(known)}{did_you_mean(kind, known)}")
    path = output or Path(f"{kind}.py")
    text = known[kind].read_text(encoding="utf-8").replace(f"{kind}.py", path.name)
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise UsageError(f"{path} is there already and is not written over; give another -o") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from None
    print(f"written: {path}; try it: autoprec search --task {path}:task --n-trials 4")
