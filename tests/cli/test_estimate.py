"""`autoprec estimate`: memory that adds up, for every arm, and what a budget allows."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from autoprec.cli import main
from autoprec.policy import Policy


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["autoprec", "estimate", "--model", "mlp", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def test_categories_and_units_add_up_to_the_peak_of_each_arm(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "policy.json"
    Policy(default="fp16").save(path)
    budget = ["--memory-budget", "20MB"]
    assert run(monkeypatch, "--batch-size", "4096", "--policy", str(path), *budget, "--format", "json") == 0
    document = json.loads(capsys.readouterr().out)
    assert list(document["arms"]) == ["fp32", "autocast fp16", "policy"]
    for arm in document["arms"].values():
        peak = arm["peak_memory_bytes"]
        assert peak["kind"] == "computed"
        assert sum(arm["memory_by_category"].values()) == sum(arm["memory_by_unit"].values()) == peak["value"]
        assert arm["throughput_samples_per_second"]["kind"] == "predicted"
    sizes = [arm["largest_batch"] for arm in document["arms"].values()]
    assert sizes[0] < sizes[2]
    assert document["remedies"][0]["name"] == "policy"


def test_the_tables_name_the_kind_of_each_number_and_what_makes_the_batch_fit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "--batch-size", "4096", "--gpu", "v100", "--memory-budget", "4MB") == 0
    text = capsys.readouterr().out
    for words in ("batch 4,096", "NVIDIA V100", "activations", "computed", "predicted", "largest batch in 4MB",
                  "accumulation", "sharded optimizer", "not in the peak"):  # fmt: skip
        assert words in text, words


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--batch-size", "0"], "greater than or equal to 1"),
        (["--memory-budget", "12"], "12GB"),
        (["--gpu", "v10"], "nearest: v100"),
        (["--policy", "nowhere.json"], "nowhere.json: cannot be read"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_wrong_setting_is_exit_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert run(monkeypatch, *arguments) == 2
    assert words in capsys.readouterr().err


def test_bf16_on_a_gpu_without_it_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    Policy(default="bf16").save(tmp_path / "policy.json")
    assert run(monkeypatch, "--policy", str(tmp_path / "policy.json"), "--gpu", "t4") == 2
    assert "no units" in capsys.readouterr().err


MIXED_TASK = """
import autoprec, torch
from torch import nn


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.layer = nn.Embedding(4, 8), nn.Linear(8, 8)

    def forward(self, x):
        rows = self.table(torch.zeros(len(x), dtype=torch.long)).clone()
        rows[torch.ones(len(x), dtype=torch.bool)] = self.layer(x)
        return rows


def task():
    batches = [torch.randn(8, 8) for _ in range(4)]
    loss = lambda model, batch: model(batch).square().mean()
    return autoprec.Task(name="mixed", model=Mixed, train_batches=batches, eval_batches=batches, loss=loss)
"""


@pytest.mark.parametrize("format", ["text", "json"])
def test_where_autocast_refuses_an_operator_fp32_is_estimated_and_autocast_says_what_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, format: str
) -> None:
    path = tmp_path / "mixed.py"
    path.write_text(MIXED_TASK)
    monkeypatch.setattr(sys, "argv", ["autoprec", "estimate", "--task", f"{path}:task", "--format", format])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    text = capsys.readouterr().out
    if format == "json":
        arms = json.loads(text)["arms"]
        assert arms["fp32"]["peak_memory_bytes"]["value"] > 0
        assert "Index put requires the source and destination dtypes match" in arms["autocast fp16"]["refused"]
    else:
        assert "autocast fp16: not estimated, since it cannot run: RuntimeError: Index put requires" in text
