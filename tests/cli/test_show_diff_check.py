"""The commands that look at policies: what they print, and that names in a file cannot style a terminal."""

from __future__ import annotations

import json
import logging
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

from autoprec.cli import main
from autoprec.errors import PrecisionWarning
from autoprec.policy import (
    GradScalerSettings,
    ModelInfo,
    ModuleInfo,
    Number,
    Policy,
    Provenance,
    UnitEvidence,
    compare_policies,
)

EVIL = "[red]<script>\x1b[31m\u202e"
"""Markup, HTML, a terminal's escape sequence and a character that turns the text round."""


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["autoprec", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def model_of(*names: str) -> ModelInfo:
    return ModelInfo(name="net", fingerprint="f", modules={name: ModuleInfo(type="Linear") for name in names})


def test_show_is_the_tree_of_the_model_with_precision_reason_and_evidence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    unit = UnitEvidence(
        precision="fp16",
        reason="cheap",
        headroom_octaves=3.25,
        flushed_share=0.011,
        saved_bytes=Number(value=2**21, kind="computed"),
    )
    policy = Policy(
        modules={"stem": "fp16", "head": "fp32"}, model=model_of("stem", "stem.conv", "body.0", "head")
    ).replace(evidence={"units": {"stem": unit}})
    policy.save(tmp_path / "policy.json")
    assert run(monkeypatch, "show", str(tmp_path / "policy.json")) == 0
    lines = [line.strip(" │├└─") for line in capsys.readouterr().out.splitlines()]
    figures = "(3.2 octaves to overflow; 1.1% of gradients flushed; saves 2.0 MiB computed)"
    assert lines[-6:] == ["net", f"stem  fp16  cheap  {figures}", "conv  fp16  by stem", "body", "0  autocast  default",
                          "head  fp32"]  # fmt: skip


def test_show_schema_is_a_json_schema_of_every_field(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "show", "--schema") == 0
    schema = json.loads(capsys.readouterr().out)
    assert set(schema["properties"]) == set(Policy.model_fields)
    assert schema["additionalProperties"] is False
    assert schema["properties"]["dtype"]["enum"] == ["fp16", "bf16"]


def test_names_from_a_file_are_printed_as_they_stand(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.delenv("NO_COLOR", raising=False)
    first = Policy(modules={"[red].<script>": "fp16"}).replace(
        evidence={"units": {"[red].<script>": {"precision": "fp16", "reason": EVIL}}}
    )
    first.save(tmp_path / "a.json")
    Policy(modules={"[red].<script>": "fp32"}).save(tmp_path / "b.json")
    assert run(monkeypatch, "show", str(tmp_path / "a.json")) == 0
    assert run(monkeypatch, "diff", str(tmp_path / "a.json"), str(tmp_path / "b.json")) == 0
    text = capsys.readouterr().out
    for harmless in ("[red]", "<script>", "\\x1b", "\\u202e"):
        assert harmless in text
    assert "\x1b[31m" not in text
    assert "\u202e" not in text


def test_no_color_leaves_no_colour(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    Policy(modules={"head": "fp32"}).save(tmp_path / "policy.json")
    assert run(monkeypatch, "show", str(tmp_path / "policy.json")) == 0
    assert "\x1b[3" not in capsys.readouterr().out


def test_units_that_changed_alike_are_one_line_and_settings_and_numbers_stand_beside(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def policy(memory: float, **rules: Any) -> Policy:
        arms = {"policy": {"peak_memory_bytes": {"value": memory, "kind": "computed"}}}
        return Policy(modules=rules, model=model_of("a.0", "a.1", "b", "c")).replace(
            evidence={"arm": "policy", "arms": arms}
        )

    first, second = policy(2**30, c="fp32"), policy(2**29, a="fp16", c="fp16")
    second = second.replace(grad_scaler=GradScalerSettings(init_scale=1024.0))
    difference = compare_policies(first, second)
    assert dict(difference.units) == {"a": ("autocast", "fp16"), "c": ("fp32", "fp16")}
    assert dict(difference.num_units) == {"a": 2, "c": 1}
    assert dict(difference.settings) == {"grad_scaler.init_scale": (65536.0, 1024.0)}
    for name, value in (("a.json", first), ("b.json", second)):
        value.save(tmp_path / name)
    files = [str(tmp_path / name) for name in ("a.json", "b.json")]
    assert run(monkeypatch, "diff", *files) == 0
    text = capsys.readouterr().out
    for words in ("a (2 units)", "1.00 GiB computed", "0.50 GiB computed", "init_scale", "1024"):
        assert words in text, words
    assert run(monkeypatch, "diff", *files, "--format", "json") == 0
    assert json.loads(capsys.readouterr().out)["units"]["c"] == ["fp32", "fp16"]
    assert run(monkeypatch, "diff", files[0], files[0]) == 0
    assert capsys.readouterr().out == "the policies say the same\n"


def test_rules_written_differently_for_the_same_precisions_do_not_differ() -> None:
    model = model_of("a.0", "a.1", "b")
    written = [Policy(modules={"a": "fp16"}, model=model), Policy(modules={"a.*": "fp16"}, model=model)]
    assert compare_policies(*written).is_empty


def test_check_says_what_fits_what_no_rule_reaches_and_what_differs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "policy.json"
    Policy(modules={"0": "fp16"}, provenance=Provenance(versions={"torch": "1.0"}, device_type="cuda")).save(path)
    assert run(monkeypatch, "check", str(path), "--model", "mlp", "--device", "cpu") == 0
    text = capsys.readouterr().out
    for words in ("fits mlp", "1 modules in fp16", "torch 1.0 -> ", "device cuda -> cpu", "no rule reaches"):
        assert words in text, words
    Policy(modules={"layer9": "fp16"}).save(path)
    assert run(monkeypatch, "check", str(path), "--model", "mlp", "--device", "cpu") == 4
    assert "layer9" in capsys.readouterr().out
    assert run(monkeypatch, "check", str(path), "--model", "mlp", "--device", "cpu", "--format", "json") == 4
    assert json.loads(capsys.readouterr().out)["fits"] is False


def test_one_logger_speaks_on_stderr_and_quiet_silences_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    import autoprec.cli.output as output

    def warn(place: Path) -> Policy:
        warnings.warn("odd\nthing", PrecisionWarning, stacklevel=1)
        logging.getLogger("autoprec.somewhere").debug("a detail")
        return Policy()

    monkeypatch.setattr("autoprec.cli.diff.read_policy", warn)
    assert output.POLICY_FILE == "policy.json"
    said = []
    for flags in ([], ["-q"], ["-v"]):
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            assert run(monkeypatch, *flags, "diff", "a", "b") == 0
        said.append(capsys.readouterr().err.splitlines())
    warning = "warning: PrecisionWarning: odd thing"
    assert said == [[warning] * 2, [], [warning, "debug: a detail"] * 2]
    assert run(monkeypatch, "-v", "-q", "diff", "a", "b") == 2


def test_a_shell_completes_the_commands(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("_AUTOPREC_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "autoprec ch")
    monkeypatch.setenv("COMP_CWORD", "1")
    assert run(monkeypatch) == 0
    assert set(capsys.readouterr().out.split()) == {"check", "choose"}
