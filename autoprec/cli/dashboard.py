"""`autoprec dashboard STUDY`: the study in optuna-dashboard, with notes and the policy, on this machine alone."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["register"]

DEFAULT_PORT = 8080


def register(app: typer.Typer) -> None:
    app.command("dashboard", help="Open a study in optuna-dashboard on 127.0.0.1, with notes and the policy.")(
        _dashboard
    )


def _dashboard(
    study: Annotated[Path, typer.Argument(help="The output folder of a search.")],
    port: Annotated[int, typer.Option("--port", min=1, max=65535, help="The port on 127.0.0.1.")] = DEFAULT_PORT,
    storage: Annotated[
        str | None, typer.Option("--storage", help="The database URL that the search was given; STUDY/study.db.")
    ] = None,
) -> None:
    from autoprec.report.escaping import printable
    from autoprec.report.extras import require_extra
    from autoprec.report.saved_search import load_search

    search = load_search(study, storage=storage)
    require_extra("dashboard", "optuna_dashboard")
    from autoprec.report.dashboard import annotate_study, serve

    written = annotate_study(search)
    where = f"study {search.front.study_name} at http://127.0.0.1:{port}/ (Ctrl-C ends it)"
    print(printable(f"{written} note(s) written; {where}"), flush=True)
    serve(search, port=port)
