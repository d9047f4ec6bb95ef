"""Tables and quantities against values worked out by hand."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from rich.table import Table
from rich.tree import Tree

from autoprec.policy import ArmEvidence, GradScalerSettings, Number, OptimizerSettings, Policy
from autoprec.report.quantities import show_bytes, show_duration, show_ratio, show_throughput
from autoprec.report.tables import comparison_table, evidence_lines, unit_tree


def text_of(content: Table | Tree) -> str:
    buffer = io.StringIO()
    Console(file=buffer, width=120, no_color=True).print(content)
    return buffer.getvalue()


def number(value: float, kind: str = "computed") -> Number:
    return Number(value=value, kind=kind)


@pytest.mark.parametrize(
    ("value", "expected"), [(10.5 * 2**30, "10.50 GiB"), (2**26, "64.0 MiB"), (0.1 * 2**30, "0.10 GiB")]
)
def test_bytes_are_shown_in_gib_or_mib(value: float, expected: str) -> None:
    assert show_bytes(number(value)) == expected


@pytest.mark.parametrize(("value", "expected"), [(2470.4, "2,470/s"), (12.345, "12.35/s")])
def test_throughput_has_the_digits_that_count(value: float, expected: str) -> None:
    assert show_throughput(number(value)) == expected


@pytest.mark.parametrize(("seconds", "expected"), [(0.2, "1 s"), (40, "40 s"), (240, "4 min"), (7200, "2.0 h")])
def test_durations_are_rounded_as_people_say_them(seconds: float, expected: str) -> None:
    assert show_duration(seconds) == expected


def test_a_ratio_needs_both_numbers_and_a_positive_reference() -> None:
    assert show_ratio(number(53), number(100)) == "0.53x"
    assert show_ratio(None, number(100)) == ""
    assert show_ratio(number(1), number(0)) == ""


def test_the_table_shows_each_number_with_its_ratio_and_kind() -> None:
    arms = {
        "fp32": ArmEvidence(
            peak_memory_bytes=number(10 * 2**30), accuracy=number(0.9, "measured"), note="reference: r"
        ),
        "autocast fp16": ArmEvidence(
            peak_memory_bytes=number(5 * 2**30), accuracy=number(0.891, "emulated"), note="proved: p"
        ),
        "trial [7]": ArmEvidence(note="not verified"),
    }
    text = text_of(comparison_table(arms))
    for words in ("10.00 GiB 1.00x", "5.00 GiB 0.50x", "0.8910", "emulated", "measured", "trial [7]", "proved"):
        assert words in text
    assert "not verified" in text
    assert "0.99x" not in text  # a share of an accuracy says nothing of what was learned


def test_the_tree_follows_the_module_names() -> None:
    policy = Policy(default="autocast", modules={"layer4.0.conv1": "fp32", "fc": "fp16"})
    lines = text_of(unit_tree(policy, title="net")).splitlines()
    assert lines[0] == "net"
    assert [line.strip(" │├└─") for line in lines[1:]] == ["layer4", "0", "conv1  fp32", "fc  fp16"]


def test_the_summary_says_what_leaves_the_defaults() -> None:
    policy = Policy(grad_scaler=GradScalerSettings(init_scale=1024.0), optimizer=OptimizerSettings(eps=1e-7))
    lines = "\n".join(evidence_lines(policy))
    assert "init_scale 1024" in lines
    assert "eps 1e-07" in lines
    assert "amsgrad" not in lines
    assert "torch's defaults" in "\n".join(evidence_lines(Policy()))
    assert "grad scaler" not in "\n".join(evidence_lines(Policy(default="fp32")))
