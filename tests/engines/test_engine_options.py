"""What is wrong with an engine's options is said before anything is started."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from autoprec.cli import output
from autoprec.cli.engine_options import EngineOptions
from autoprec.cli.study_options import StudyOptions
from autoprec.cli.task_options import TaskOptions, as_arguments
from autoprec.engines import command as command_module
from autoprec.engines.command import Command, WorkerLostError
from autoprec.errors import UsageError
from autoprec.search.database_urls import without_password
from autoprec.search.events import Events

SERVER = "postgresql://me@host/db"


def run(engine: str, *, storage: str | None = SERVER, study_name: str | None = "s", **options: object) -> None:
    chosen = EngineOptions(engine=engine, **options)
    if chosen.is_local:
        return
    chosen.run([], [], storage=storage, study_name=study_name, num_workers=2, num_gpus=1, output=None, events=Events())


@pytest.mark.parametrize(
    ("engine", "options", "words"),
    [
        ("slrum", {}, "engine 'slrum'; allowed: local, slurm, ray, ray:ADDRESS; nearest: slurm"),
        ("ray", {"slurm_partition": "gpu"}, "--slurm-partition: with --engine slurm alone"),
        ("local", {"slurm_option": ["qos=x"]}, "--slurm-option: with --engine slurm alone"),
        ("slurm", {"storage": None}, "give --storage and --study-name"),
        ("ray", {"study_name": None}, "give --storage and --study-name"),
        ("slurm", {"storage": "sqlite:///x.db"}, "SQLite is for the processes of one machine"),
        ("ray:host:6379", {"storage": "sqlite:///x.db"}, "SQLite is for the processes of one machine"),
        ("slurm", {"storage": "postgresql://me:s3cret@host/db"}, "PGPASSFILE"),
    ],
)
def test_what_is_wrong_is_a_usage_error(engine: str, options: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        run(engine, **options)
    assert words in str(caught.value)
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize(("engine", "package"), [("ray", "ray"), ("slurm", "submitit")])
def test_a_package_that_is_not_there_is_named_with_the_way_to_it(
    engine: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UsageError, match=rf"engine {engine}: .*pip install 'autoprec\[{engine}\]'"):
        run(engine)


def test_arguments_say_what_options_do_not_leave_at_their_default() -> None:
    task = TaskOptions(model="mlp", checkpoint=["a", "b*"], tf32=False, channels_last=True, lr=0.01)
    study = StudyOptions(steps=4, margin=0.1)
    assert as_arguments(task, study) == [
        *["--model", "mlp", "--lr", "0.01", "--checkpoint", "a", "--checkpoint", "b*"],
        *["--channels-last", "--no-tf32", "--margin", "0.1", "--steps", "4"],
    ]
    assert as_arguments(TaskOptions(), StudyOptions()) == []


@pytest.mark.parametrize("kind", [TaskOptions, StudyOptions, EngineOptions])
def test_every_option_has_one_name_that_can_be_written(kind: type) -> None:
    for field in dataclasses.fields(kind):
        value = ["x"] if "list" in str(field.type) else True if "bool" in str(field.type) else "x"
        if value != field.default:
            assert as_arguments(kind(**{field.name: value}))[0].startswith("--")


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("postgresql://me:s3cret@host:5433/db?sslmode=require", "postgresql://me@host:5433/db?sslmode=require"),
        ("postgresql://me@host/db", None),
        ("sqlite:///a/b.db", None),
        ("postgresql://me:p%40ss%2Fw@host/db", "postgresql://me@host/db"),
    ],
)
def test_a_password_is_taken_out_of_a_url(url: str, expected: str | None) -> None:
    assert without_password(url) == (
        (url, None) if expected is None else (expected, "p@ss/w" if "%40" in url else "s3cret")
    )


def command(script: str, folder: Path, monkeypatch: pytest.MonkeyPatch, **settings: object) -> Command:
    """Return a command that runs a shell script in the place of `python -m autoprec`."""
    (folder / "program").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "program").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(folder / "program"))
    return Command(["worker"], folder=str(folder), **settings)


def test_a_command_brings_back_how_it_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finished = command("echo out; echo wrong >&2; exit 2", tmp_path, monkeypatch, returns_files=True)()
    assert (finished.exit_code, finished.stdout, finished.stderr) == (2, "out\n", "wrong\n")


def test_a_password_is_in_the_environment_of_a_command_and_nowhere_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = command('echo "$PGPASSWORD $*"', tmp_path, monkeypatch, returns_files=True, password="s3cret")
    words = asked().stdout.split()
    assert words[:4] == ["s3cret", "-m", "autoprec", "worker"]
    assert not any("s3cret" in word for word in words[1:])


def test_a_command_that_a_signal_ends_is_started_again_a_few_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    once = command("echo x >> count; [ $(wc -l < count) -ge 2 ] || kill -9 $$", tmp_path, monkeypatch)
    assert once().exit_code == 0
    always = command("echo x >> always; kill -9 $$", tmp_path, monkeypatch)
    with pytest.raises(WorkerLostError, match="signal 9 ended the worker 3 times"):
        always()
    assert (tmp_path / "always").read_text() == "x\n" * 3


def test_a_command_that_is_told_to_end_is_started_again_if_its_job_is_not_taken_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert command_module.INTERRUPTED == output.INTERRUPTED
    monkeypatch.setattr(command_module, "LEAVING_SECONDS", 0.5)
    asked = command("echo x >> count; [ $(wc -l < count) -ge 2 ] || exit 130", tmp_path, monkeypatch)
    started = time.monotonic()
    assert asked().exit_code == 0
    assert time.monotonic() - started >= 0.5
    always = command("exit 130", tmp_path, monkeypatch)
    with pytest.raises(WorkerLostError, match="an interrupt ended the worker 3 times"):
        always()


def test_a_command_that_is_interrupted_takes_its_process_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = command("echo $$ > pid; exec sleep 600 2>&1", tmp_path, monkeypatch)

    def interrupt() -> None:
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # pytest-xdist's processes ignore it
    try:
        threading.Thread(target=interrupt).start()
        with pytest.raises(KeyboardInterrupt):
            asked()
    finally:
        signal.signal(signal.SIGINT, before)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_a_command_that_leaves_a_process_with_its_stderr_behind_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command_module, "STOP_SECONDS", 0.5)
    asked = command("sleep 20 & echo $! > pid; echo wrong >&2; exit 2", tmp_path, monkeypatch, returns_files=True)
    started = time.monotonic()
    finished = asked()
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
    assert (finished.exit_code, finished.stderr) == (2, "wrong\n")
    assert time.monotonic() - started < 10


def test_a_command_that_does_not_end_when_it_is_told_to_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command_module, "STOP_SECONDS", 0.5)
    script = "trap '' TERM; echo $$ > pid; for i in $(seq 200); do sleep 0.1; done"
    asked = command(script, tmp_path, monkeypatch, returns_files=True)

    def stop() -> None:
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            time.sleep(0.02)
        asked.stop()

    threading.Thread(target=stop).start()
    started = time.monotonic()
    assert asked().exit_code == -signal.SIGKILL
    assert time.monotonic() - started < 10


def test_the_files_of_a_command_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finished = command(
        'for last; do :; done; echo "{}" > "$last/policy.json"', tmp_path, monkeypatch, returns_files=True
    )()
    assert finished.files == {"policy.json": "{}\n"}


def test_a_worker_ends_when_the_job_that_started_it_is_gone(tmp_path: Path) -> None:
    (tmp_path / "child.py").write_text(
        "import time\nfrom autoprec.trials.lifeline import follow_parent\nfollow_parent()\n"
        "print('up', flush=True)\ntime.sleep(600)\n"
    )
    (tmp_path / "parent.py").write_text(
        "import subprocess, sys\nfrom autoprec.trials.lifeline import as_parent\n"
        "with as_parent():\n    child = subprocess.Popen([sys.executable, 'child.py'])\nchild.wait()\n"
    )
    with subprocess.Popen([sys.executable, "parent.py"], cwd=tmp_path, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "up\n"
        parent.kill()
        assert parent.stdout.read() == ""  # closed when the child is gone, too
