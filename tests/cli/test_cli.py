"""The program as a person meets it: help, errors and exit codes, text and JSON."""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from autoprec.cli import main
from autoprec.cli.output import parse_memory
from autoprec.cli.progress import Progress
from autoprec.errors import TaskError, UsageError
from autoprec.policy import Policy, Recommendation, UnitEvidence
from autoprec.trials.outcome import Outcome

sys.path.insert(0, str(Path(__file__).parents[1] / "search"))
from toys import FakeMeasure, tiny_task


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Run the program in this process and return its exit code."""
    monkeypatch.setattr(sys, "argv", ["autoprec", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeMeasure:
    """Let `search` train the toy task with computed outcomes, in an empty directory."""
    import autoprec.search.measuring as measuring
    import autoprec.tasks.source as source

    measure = FakeMeasure(noise=0.001)

    def opened(task: Any, **how: object) -> contextlib.AbstractContextManager[FakeMeasure]:
        return contextlib.nullcontext(measure)

    monkeypatch.setattr(source.TaskSource, "build", lambda self: tiny_task())
    monkeypatch.setattr(measuring, "open_measure", opened)
    monkeypatch.chdir(tmp_path)
    return measure


def test_help_lists_the_commands_and_loads_neither_torch_nor_optuna() -> None:
    code = (
        "import sys, io, contextlib\n"
        "from autoprec.cli import main\n"
        "sys.argv = ['autoprec', '--help']\n"
        "out = io.StringIO()\n"
        "with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit): main()\n"
        "assert all(name in out.getvalue() for name in ('search', 'verify', 'choose', 'show')), out.getvalue()\n"
        "print(' '.join(m for m in ('torch', 'optuna', 'numpy', 'pydantic') if m in sys.modules))\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == []


def test_python_m_autoprec_is_the_program() -> None:
    result = subprocess.run([sys.executable, "-m", "autoprec", "spaces", "nonesuch"], capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("autoprec: search space 'nonesuch'")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "resnet5"], "nearest: resnet"),
        (["--data", "digit"], "nearest: digits"),
        (["--data", "imagefolder:/no/such"], "imagefolder"),
        (["--optimizer", "adanw"], "nearest: adamw"),
        (["--gpu", "a1000"], "nearest: a100"),
        (["--device", "cudda"], "nearest: cuda"),
        (["--sampler", "tpee"], "nearest: tpe"),
        (["--prefer", "quickest"], "allowed: balanced, fastest, smallest"),
        (["--space", "cn"], "nearest: cnn"),
        (["--format", "jsn"], "nearest: json"),
        (["--n-trials", "0"], "at least 1"),
        (["--margin", "-1"], "positive"),
        (["--max-seeds", "1"], "at least 2"),
        (["--memory-budget", "12"], "12GB"),
        (["--batch-size", "100000"], "larger than"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_wrong_setting_is_one_line_with_what_is_allowed_and_exit_2(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    arguments: list[str],
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    if "--space" in arguments:
        import autoprec.tasks.source as source

        monkeypatch.setattr(source.TaskSource, "build", lambda self: tiny_task())
    assert run(monkeypatch, "search", "--model", "resnet18", *arguments) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_an_option_that_does_not_exist_is_exit_2(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(monkeypatch, "search", "--modle", "resnet18") == 2


@pytest.mark.usefixtures("toy")
def test_a_storage_that_is_none_is_exit_2_and_shows_no_password(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "search", "--storage", "postgre://me:s3cret@host/db") == 2
    error = capsys.readouterr().err
    assert "nearest: postgresql" in error
    assert "s3cret" not in error


def test_a_search_says_what_it_will_do_shows_progress_one_table_and_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], toy: FakeMeasure
) -> None:
    assert run(monkeypatch, "search", "--n-trials", "6", "--gpu", "v100", "-o", "out") == 0
    text = capsys.readouterr().out
    for words in ("task      tiny", "NVIDIA V100", "computed and predicted", "2 baselines", "about", "margin"):
        assert words in text.replace("\n", " "), words
    assert "[1/6] fp32" in text
    assert "best so far" in text
    assert "score (proof)" in text
    assert "Use the found policy (autocast FP16, blocks.*.conv, " in " ".join(text.split())
    assert "provisional" in text
    assert (Path("out") / "policy.json").exists()
    assert len(toy.order) > 6


def test_the_same_command_again_runs_nothing_and_ends_the_same(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], toy: FakeMeasure
) -> None:
    assert run(monkeypatch, "search", "--n-trials", "6") == 0
    first = capsys.readouterr().out.splitlines()[-1]
    num_runs = len(toy.order)
    assert run(monkeypatch, "search", "--n-trials", "6") == 0
    assert len(toy.order) == num_runs
    text = capsys.readouterr().out
    assert "the study holds 6 finished trials; best so far half everywhere" in text
    assert text.splitlines()[-1] == first


@pytest.mark.usefixtures("toy")
def test_json_is_one_document_on_stdout_and_progress_goes_to_stderr(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "search", "--n-trials", "6", "--format", "json") == 0
    streams = capsys.readouterr()
    document = json.loads(streams.out)
    assert document["recommendation"]["choice"] == "policy"
    assert document["arms"]["fp32"]["peak_memory_bytes"] == {"value": 1e9, "kind": "computed"}
    assert document["num_trials"] == 6
    assert all(Path(file).exists() for file in document["files"])
    assert "[1/6] fp32" in streams.err


def test_an_inconclusive_proof_is_exit_3(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], toy: FakeMeasure
) -> None:
    toy._noise, toy._effect = 0.6, lambda policy: -0.3 if policy.low_precisions else 0.0
    assert run(monkeypatch, "search", "--n-trials", "6") == 3
    assert "Inconclusive" in capsys.readouterr().out


def test_ctrl_c_writes_the_best_so_far_and_is_exit_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], toy: FakeMeasure
) -> None:
    toy._stop_at = 5
    assert run(monkeypatch, "search", "--n-trials", "6", "-o", "out") == 130
    assert "goes on where it stopped" in capsys.readouterr().err
    assert (Path("out") / "policy.json").exists()


def test_a_failing_task_is_its_exit_code_and_verbose_shows_the_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    import autoprec.tasks.source as source

    def build(self: object) -> None:
        raise TaskError("no such folder")

    monkeypatch.setattr(source.TaskSource, "build", build)
    monkeypatch.chdir(tmp_path)
    assert run(monkeypatch, "search") == 2
    assert capsys.readouterr().err == "autoprec: no such folder\n"
    assert run(monkeypatch, "-v", "search") == 2
    assert "Traceback" in capsys.readouterr().err


def test_show_prints_the_recommendation_and_the_tree_of_units(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    policy = Policy(
        default="autocast",
        modules={"encoder.ln": "fp16"},
        recommendation=Recommendation(choice="policy", sentence="Use it [bold]now[/bold]."),
    )
    units = {"encoder.ln": UnitEvidence(precision="fp16", reason="saves memory")}
    policy = policy.replace(evidence={"units": units})
    policy.save(tmp_path / "policy.json")
    assert run(monkeypatch, "show", str(tmp_path / "policy.json")) == 0
    text = capsys.readouterr().out
    assert "Use it [bold]now[/bold]." in text  # names and messages cannot style the output
    assert "encoder" in text
    assert "ln  fp16  saves memory" in text


def test_show_as_json_is_the_policy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    policy = Policy(default="autocast", modules={"head": "fp32"})
    policy.save(tmp_path / "policy.json")
    assert run(monkeypatch, "show", str(tmp_path / "policy.json"), "--format", "json") == 0
    assert Policy.from_json(capsys.readouterr().out) == policy


@pytest.mark.parametrize("content", [None, "{", '{"schema_version": 99}', '{"modlues": {}}'])
def test_a_bad_policy_is_one_line_and_exit_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, content: str | None
) -> None:
    path = tmp_path / "policy.json"
    if content is not None:
        path.write_text(content)
    assert run(monkeypatch, "show", str(path)) == 2
    error = capsys.readouterr().err
    assert error.startswith("autoprec: policy.json")
    assert error.count("\n") == 1


@pytest.mark.usefixtures("toy")
def test_choose_recommends_again_for_a_budget_and_writes_the_policy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], toy: FakeMeasure
) -> None:
    assert run(monkeypatch, "search", "--n-trials", "6", "-o", "out") == 0
    num_runs = len(toy.order)
    capsys.readouterr()
    assert run(monkeypatch, "choose", "out", "--prefer", "smallest", "--memory-budget", "1 GB", "-o", "small.json") == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "Use the found policy (autocast BF16, blocks.*.conv, " in text
    assert "written: small.json" in text
    assert Policy.from_json(Path("small.json").read_text()).recommendation.prefer == "smallest"  # type: ignore[union-attr]
    assert run(monkeypatch, "choose", "out/front.json", "--memory-budget", "1MB", "--format", "json") == 3
    assert Policy.from_json(capsys.readouterr().out).default == "fp32"
    assert run(monkeypatch, "choose", "out", "--prefer", "quickest") == 2
    assert run(monkeypatch, "choose", "nowhere") == 2
    assert len(toy.order) == num_runs


@pytest.mark.usefixtures("toy")
def test_show_of_a_search_prints_the_front_with_picks_kinds_and_verdicts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "search", "--n-trials", "6", "-o", "out") == 0
    capsys.readouterr()
    for place in ("out", "out/front.json"):
        assert run(monkeypatch, "show", place) == 0
        text = " ".join(capsys.readouterr().out.split())
        for words in ("recommended", "smallest", "proved", "reference", "computed", "predicted", "emulated", "0.60x"):
            assert words in text, words
    assert run(monkeypatch, "show", "out/front.json", "--format", "json") == 0
    assert json.loads(capsys.readouterr().out)["recommended"].startswith("autocast BF16, blocks.*.conv, ")


WRITTEN = Policy(default="autocast", modules={"norm": "fp16"})


@pytest.mark.parametrize(
    ("noise", "effect", "code", "word"),
    [(0.001, 0.0, 0, "Proved"), (0.001, -0.1, 1, "Worse"), (0.4, 0.0, 3, "Open")],
    ids=["proved", "worse", "open"],
)
def test_verify_proves_a_policy_written_by_hand_and_says_so_by_its_exit_code(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    toy: FakeMeasure,
    noise: float,
    effect: float,
    code: int,
    word: str,
) -> None:
    WRITTEN.save("policy.json")
    toy._noise, toy._effect = noise, lambda policy: effect if policy.modules else 0.0
    assert run(monkeypatch, "verify", "policy.json", "--gpu", "v100") == code
    text = capsys.readouterr().out
    for words in ("autocast fp16", "computed", "predicted", "score (proof)", word, "provisional"):
        assert words in text, words
    assert Policy.from_json(Path("policy.json").read_text()) == WRITTEN


@pytest.mark.usefixtures("toy")
def test_verify_updates_the_file_only_when_asked_and_then_holds_it_to_its_promise(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    WRITTEN.save("policy.json")
    assert run(monkeypatch, "verify", "policy.json", "--update") == 0
    text = Path("policy.json").read_text()
    assert Policy.from_json(text).evidence is not None
    capsys.readouterr()
    assert run(monkeypatch, "verify", "policy.json", "--format", "json") == 0
    document = json.loads(capsys.readouterr().out)
    assert [promise["behind"] for promise in document["promises"]] == [False, False, False]
    for field, factor, what in [
        ("peak_memory_bytes", 0.9, "peak memory"),
        ("throughput_ratio", 1.1, "throughput over FP32"),
        ("accuracy", 1.1, "accuracy"),
    ]:
        promised = json.loads(text)
        promised["evidence"]["arms"]["policy"][field]["value"] *= factor
        Path("policy.json").write_text(json.dumps(promised))
        assert run(monkeypatch, "verify", "policy.json") == 1
        text_out = capsys.readouterr().out
        assert f"BEHIND: {what} " in text_out
        assert text_out.count("BEHIND") == 1


@pytest.mark.usefixtures("toy")
def test_verify_of_a_policy_that_does_not_fit_is_exit_4(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Policy(modules={"layer9": "fp32"}).save("policy.json")
    assert run(monkeypatch, "verify", "policy.json") == 4
    assert "layer9" in capsys.readouterr().err


def test_ctrl_c_in_verify_is_exit_130_and_the_same_command_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], toy: FakeMeasure
) -> None:
    WRITTEN.save("policy.json")
    toy._stop_at = 5
    assert run(monkeypatch, "verify", "policy.json") == 130
    assert "goes on where it stopped" in capsys.readouterr().err
    toy._stop_at = None
    assert run(monkeypatch, "verify", "policy.json") == 0
    assert len(toy.order) == 12


@pytest.mark.parametrize("text", ["12", "GB", "-1GB", "0GB", "12XB"])
def test_a_memory_that_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="12GB"):
        parse_memory(text)


def test_sizes_are_decimal_or_binary() -> None:
    assert (parse_memory("12GB"), parse_memory("1.5 gib"), parse_memory(None)) == (12e9, 1.5 * 2**30, None)


def test_spaces_lists_what_comes_along_and_explains_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "spaces", "--format", "json") == 0
    listed = json.loads(capsys.readouterr().out)
    assert {"cnn", "resnet", "transformer", "vit", "bert", "gpt", "rnn", "mlp", "unet", "speech"} <= {
        space["name"] for space in listed
    }
    assert run(monkeypatch, "spaces", "bert") == 0
    explained = capsys.readouterr().out
    assert "start from fp32 (practice keeps the feed-forward layers of language models in FP32)" in explained
    assert "grad_scaler/growth_interval: 500, 1000, 2000" in explained
    assert run(monkeypatch, "spaces", "brt") == 2
    assert "nearest: bert" in capsys.readouterr().err


def test_the_seconds_of_a_phase_add_up_over_the_runs() -> None:
    progress = Progress(Console(file=io.StringIO()), SimpleNamespace(num_workers=2, task=tiny_task()))  # type: ignore[arg-type]
    for seed in range(3):
        progress.verification_finished("fp32", seed, Outcome(kind="crashed", phase_seconds={"training": 2.0}))
    shares = progress.shares(10.0)
    assert (shares["training"], shares["rest"]) == pytest.approx((0.3, 0.7))


SCRIPT = """
import sys

import torch
from torch import nn

assert sys.argv[1:] == ["--epochs", "1"], sys.argv
if __name__ == "__main__":
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(100):
        optimizer.zero_grad()
        model(torch.ones(4, 4)).square().mean().backward()
        optimizer.step()
"""


def test_doctor_runs_a_script_as_it_is_with_its_own_options(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    arguments = ["doctor", "--num-steps", "3", "--format", "json", str(path), "--", "--epochs", "1"]
    monkeypatch.setattr(sys, "argv", ["autoprec", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code in (0, None, 1)
    assert json.loads(capsys.readouterr().out)["facts"]["steps"].startswith("3 tried")
    assert sys.argv == ["autoprec", *arguments]
