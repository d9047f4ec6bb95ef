"""The figures of a report as PNG files, drawn by kaleido in a Chromium or Chrome that is installed already."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import kaleido

from autoprec.errors import UsageError
from autoprec.report.figures.style import named
from autoprec.report.html import ReportFigure

__all__ = ["find_browser", "write_images"]

BROWSERS = (
    "chromium-headless-shell",
    "chromium",
    "chromium-browser",
    "google-chrome",
    "google-chrome-stable",
    "chrome",
)
WIDTH = 900
TITLE_HEIGHT = 40
SCALE = 2
"""Pixels of the file to one of the figure."""


def find_browser() -> str:
    """Return the program that draws: `BROWSER_PATH`, else the first of `BROWSERS` that is installed.

    Raises:
        UsageError: there is none.
    """
    found = os.environ.get("BROWSER_PATH") or next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        raise UsageError(
            "PNGs are drawn by Chromium or Chrome, and none is found; install one, or set BROWSER_PATH to it"
        )
    return found


def write_images(figures: Sequence[ReportFigure], folder: Path) -> list[Path]:
    """Write each figure that there is to `folder` as NAME.png, black on white, and return the files.

    Raises:
        UsageError: no browser is found, or the folder cannot be written.
    """
    shown = [figure for figure in figures if figure.figure is not None]
    options = {"path": find_browser(), "mathjax": False}  # MathJax would come from the network
    try:
        folder.mkdir(parents=True, exist_ok=True)
        kaleido.write_fig_from_object_sync([_job(figure, folder) for figure in shown], kopts=options)
    except OSError as error:
        raise UsageError(f"{folder.name}: cannot be written ({error.strerror or error})") from None
    return [folder / f"{figure.name}.png" for figure in shown]


def _job(figure: ReportFigure, folder: Path) -> dict[str, Any]:
    assert figure.figure is not None
    drawn = figure.figure.to_dict()
    layout = drawn["layout"]
    height = layout["height"] + TITLE_HEIGHT
    margin = {**layout["margin"], "t": layout["margin"]["t"] + TITLE_HEIGHT}
    title = {"text": named(figure.title), "x": 0.01, "y": 1 - 12 / height, "yanchor": "top"}
    drawn["layout"] = {**layout, "title": title, "margin": margin, "height": height, "paper_bgcolor": "white"}
    size = {"format": "png", "width": WIDTH, "height": height, "scale": SCALE}
    return {"fig": drawn, "path": folder / f"{figure.name}.png", "opts": size}
