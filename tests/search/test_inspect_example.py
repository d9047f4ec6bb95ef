"""The example that reads a study with plain Optuna."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
from toys import FakeMeasure, tiny_plan

from autoprec.search.pipeline import run_search

EXAMPLE = Path(__file__).parents[2] / "examples" / "inspect_study.py"


def test_it_prints_the_front_and_what_each_objective_depended_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_search(tiny_plan(tmp_path, n_trials=9), FakeMeasure(noise=0.001))
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), str(tmp_path)])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    text = capsys.readouterr().out
    assert "front: half everywhere: peak_memory_bytes" in text
    assert "peak_memory_bytes depended most on: precision/" in text
