"""`autoprec report STUDY`: why, as one HTML file to look at, to print and to send."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autoprec.errors import UsageError

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    app.command("report", help="Write what a search found, and why, as one HTML file; nothing is run.")(_report)


def _report(
    study: Annotated[Path, typer.Argument(help="The output folder of a search.")],
    output: Annotated[Path | None, typer.Option("-o", "--output", help="The file to write; STUDY/report.html.")] = None,
    png: Annotated[
        Path | None, typer.Option("--png", help="Write each figure to this folder, too; needs Chromium or Chrome.")
    ] = None,
    storage: Annotated[
        str | None, typer.Option("--storage", help="The database URL that the search was given; STUDY/study.db.")
    ] = None,
) -> None:
    from autoprec.report.escaping import printable
    from autoprec.report.extras import require_extra
    from autoprec.report.saved_search import load_search

    search = load_search(study, storage=storage)
    require_extra("report", "jinja2", "plotly", *(["kaleido"] if png is not None else []))
    from autoprec.report.html import report_figures, write_report

    path = output or study / "report.html"
    try:
        size = write_report(search, path)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from None
    print(printable(f"written: {path} ({size / 1e6:.1f} MB)"))
    if png is not None:
        from autoprec.report.images import write_images

        images = write_images(report_figures(search), png)
        print(printable(f"written: {len(images)} figures in {png}"))
