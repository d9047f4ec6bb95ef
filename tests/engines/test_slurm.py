"""Searches on a real SLURM, of one node that believes in two GPUs, with the study on a real PostgreSQL server."""

from __future__ import annotations

import random
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from postgres_server import find_programs, postgres_server
from recorded_task import SECONDS
from searches import Start, check_ended, finished, record, wait_for_trials
from slurm_cluster import has_programs, slurm_cluster

pytestmark = pytest.mark.xdist_group("slurm")  # one cluster for all of them


@pytest.fixture(scope="module")
def places() -> Iterator[tuple[Path, str]]:
    """A cluster's configuration and a server's URL."""
    pytest.importorskip("submitit", reason="needs submitit: pip install 'autoprec[slurm]'")
    pytest.importorskip("psycopg", reason="needs psycopg: pip install 'autoprec[postgresql]'")
    programs = find_programs()
    if programs is None:
        pytest.skip("needs a PostgreSQL server: initdb and postgres")
    if not has_programs():
        pytest.skip("needs SLURM: slurmctld, slurmd and its commands")
    with postgres_server(programs) as url, slurm_cluster() as configuration:
        yield configuration, url


@pytest.fixture
def storage(places: tuple[Path, str], monkeypatch: pytest.MonkeyPatch) -> str:
    """A database of a test's own, whose password is in the environment."""
    import psycopg

    configuration, url = places
    monkeypatch.setenv("SLURM_CONF", str(configuration))
    monkeypatch.setenv("PGPASSWORD", "s3cret")
    name = f"study{random.getrandbits(48):x}"
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
    return url.replace(":s3cret", "").rpartition("/")[0] + f"/{name}"


def squeue() -> list[list[str]]:
    """Return [job, state] of each job that SLURM has."""
    told = subprocess.run(
        ["squeue", "--noheader", "--array", "--format=%i %t"], capture_output=True, text=True, check=True
    )
    return [line.split() for line in told.stdout.splitlines()]


def requeue(job: str) -> None:
    """End a job and queue it again, as one of a higher priority does; without the two minutes that SLURM then waits."""
    subprocess.run(["scontrol", "requeue", job], check=True)
    deadline = time.monotonic() + 60
    while [job, "PD"] not in squeue():
        assert time.monotonic() < deadline
        time.sleep(0.2)
    subprocess.run(["scontrol", "update", f"jobid={job}", "starttime=now"], check=True)


def test_slurm_runs_two_workers_each_on_its_own_device_and_queues_a_preempted_one_again(
    start: Start, storage: str, tmp_path: Path
) -> None:
    search = start(tmp_path, "slurm", "--slurm-partition", "gpu", "--workers", "2", storage=storage)
    wait_for_trials(search, tmp_path, count=3)
    running = [job for job, state in squeue() if state == "R"]
    assert len(running) == 2
    for job in running:
        requeue(job)
    check_ended(search, tmp_path)
    assert squeue() == []
    assert len(set(record(tmp_path))) >= 4  # both came back
    assert {"0", "1"} <= {devices for devices, _ in record(tmp_path)}
    assert "s3cret" not in "".join(path.read_text(errors="replace") for path in (tmp_path / "run/jobs").iterdir())


@pytest.mark.slow  # two minutes, most of which SLURM and the search wait for it to be missed
def test_a_job_that_slurm_ends_is_submitted_anew(start: Start, storage: str, tmp_path: Path) -> None:
    search = start(tmp_path, "slurm", "--workers", "2", storage=storage)
    wait_for_trials(search, tmp_path, count=3)
    (tmp_path / SECONDS).write_text("60")  # or the other worker has done all before the job is missed
    before = {job for job, _ in squeue()}
    subprocess.run(["scancel", "--signal=KILL", "--full", min(before)], check=True)
    deadline = time.monotonic() + 90
    while not {job for job, _ in squeue()} - before:
        assert time.monotonic() < deadline
        assert search.poll() is None
        time.sleep(0.2)
    (tmp_path / SECONDS).write_text("0.5")
    check_ended(search, tmp_path)


def test_what_slurm_refuses_is_told_in_its_own_words(start: Start, storage: str, tmp_path: Path) -> None:
    search = start(tmp_path, "slurm", "--slurm-partition", "gpus", storage=storage)
    _, stderr = search.communicate(timeout=60)
    assert search.returncode == 2, stderr
    assert "invalid partition specified: gpus" in stderr
    assert finished(tmp_path) == []
    assert squeue() == []
