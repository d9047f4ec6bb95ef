"""What the system, a number or a file can do to the program is one line on stderr, and exit code 1 or 2."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from autoprec.policy import Policy

PROGRAM = [sys.executable, "-m", "autoprec"]


def run(*arguments: str | bytes, **how: object) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([*PROGRAM, *arguments], capture_output="stdout" not in how, timeout=60, **how)  # type: ignore[call-overload, no-any-return]


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    Policy(modules={"layer": "fp32"}).save(path := tmp_path_factory.mktemp("policy") / "policy.json")
    return path


@pytest.mark.parametrize(
    ("output", "words"),
    [
        ("file/below", "Not a directory"),
        ("n" * 300 + ".json", "File name too long"),
        ("no/such/folder/x.json", "No such file or directory"),
        ("", "argument 6, after -o: it is empty"),
    ],
    ids=["under a file", "a long name", "no folder", "nothing"],
)
def test_an_output_that_cannot_be_written_is_one_line(output: str, words: str, policy: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("precious")
    ran = run("export", str(policy), "--to", "deepspeed", "-o", output, cwd=tmp_path)
    assert ran.returncode == 2
    *_, last = ran.stderr.decode().splitlines()
    assert last.startswith("autoprec: ")
    assert words in last
    assert "Traceback" not in ran.stderr.decode()
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("output", ["file", "file/below", "n" * 300], ids=["a file", "under a file", "a long name"])
def test_a_folder_that_cannot_be_made_is_one_line(output: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("precious")
    ran = run("-q", "search", "--model", "mlp", "--steps", "4", "-o", output, cwd=tmp_path)
    assert ran.returncode == 2
    assert ran.stderr.decode().count("\n") == 1
    assert (tmp_path / "file").read_text() == "precious"


@pytest.mark.parametrize(
    "arguments",
    [
        ["search", "--model", "mlp", "-o", ""],
        ["search", "--model", "mlp", "--output="],
        ["verify", "policy.json", "--model", "mlp", "--output", ""],
        ["choose", ""],
        ["init", "-o", ""],
    ],
    ids=["search", "search with a sign", "verify", "choose", "init"],
)
def test_an_empty_argument_is_a_usage_error_and_not_the_working_folder(arguments: list[str], tmp_path: Path) -> None:
    ran = run(*arguments, cwd=tmp_path)
    assert ran.returncode == 2
    assert ran.stderr.decode().count("\n") == 1
    assert "is empty; leave it out" in ran.stderr.decode()
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_on_stdout_is_one_line(policy: Path) -> None:
    with open("/dev/full", "wb") as full:
        ran = run("show", str(policy), stdout=full, stderr=subprocess.PIPE)
    assert ran.returncode == 1
    assert ran.stderr == b"autoprec: No space left on device\n"


def test_a_closed_output_is_no_error_of_ours(policy: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as closed:
        ran = run("show", str(policy), stdout=closed, stderr=subprocess.PIPE)
    assert ran.returncode == 1
    assert ran.stderr == b""


def test_an_argument_that_is_no_text_is_one_line() -> None:
    ran = run("show", b"\xff\xfe.json")
    assert ran.returncode == 2
    assert ran.stderr == rb"autoprec: argument 2, '\udcff\udcfe.json': not UTF-8 text" + b"\n"


@pytest.mark.parametrize("seed", ["1" * 23, "-" + "1" * 23, "1" * 5_000])
def test_a_seed_that_is_too_large_is_a_usage_error(seed: str, tmp_path: Path) -> None:
    ran = run("search", "--model", "mlp", "--seed", seed, cwd=tmp_path)
    assert ran.returncode == 2
    assert b"Traceback" not in ran.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("format", ["text", "json"])
def test_a_policy_on_a_pipe_is_shown(format: str, policy: Path, tmp_path: Path) -> None:
    os.mkfifo(pipe := tmp_path / "pipe")
    writer = threading.Thread(target=pipe.write_bytes, args=(policy.read_bytes(),))
    writer.start()
    ran = run("show", str(pipe), "--format", format)
    writer.join()
    assert ran.returncode == 0
    assert b"layer" in ran.stdout


def test_a_policy_on_stdin_is_shown(policy: Path) -> None:
    with policy.open("rb") as file:
        ran = run("show", "/dev/stdin", stdin=file)
    assert ran.returncode == 0
    assert b"layer" in ran.stdout


SEARCH = ["-q", "search", "--model", "mlp", "--n-trials", "3", "--steps", "4", "--max-seeds", "3", "--workers", "1"]


def test_a_working_folder_that_was_removed_is_one_line(tmp_path: Path) -> None:
    (gone := tmp_path / "gone").mkdir()
    script = f"rmdir {gone}; exec {sys.executable} -m autoprec search --model mlp --n-trials 3"
    ran = subprocess.run(["sh", "-c", script], cwd=gone, capture_output=True, timeout=100)
    assert ran.returncode == 2
    assert (
        ran.stderr == b"autoprec: the working folder is not there any more; go to another one, or give -o /WHOLE/PATH\n"
    )


@pytest.mark.slow
def test_a_search_runs_without_passwd_entry_home_and_working_folder(tmp_path: Path) -> None:
    setpriv = shutil.which("setpriv")
    if os.geteuid() != 0 or setpriv is None:
        pytest.skip("only root can run a program as somebody whom the system does not know")
    nobody = 54_321
    for folder in ("gone", "out", "tmp"):
        (tmp_path / folder).mkdir()
        os.chown(tmp_path / folder, nobody, nobody)
    os.chown(tmp_path, nobody, nobody)
    for above in (tmp_path, *tmp_path.parents):
        if above.stat().st_uid == 0 and str(above).startswith("/tmp/"):
            above.chmod(above.stat().st_mode | 0o711)
    script = f"rmdir {tmp_path / 'gone'}; exec {sys.executable} -m autoprec {' '.join(SEARCH)} -o {tmp_path / 'out'}"
    kept = {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ}
    environment = {**kept, "TMPDIR": str(tmp_path / "tmp"), "OMP_NUM_THREADS": "1"}
    reads_all = [f"--{kind}-caps=+dac_read_search" for kind in ("inh", "ambient")]  # an interpreter in a home folder
    ran = subprocess.run(
        [setpriv, f"--reuid={nobody}", f"--regid={nobody}", "--clear-groups", *reads_all, "sh", "-c", script],
        cwd=tmp_path / "gone", env=environment, capture_output=True, timeout=300,
    )  # fmt: skip
    assert not (tmp_path / "gone").exists()
    assert b"Traceback" not in ran.stderr, ran.stderr.decode()
    assert ran.returncode in (0, 3), ran.stderr.decode()
    assert (tmp_path / "out" / "policy.json").is_file()
