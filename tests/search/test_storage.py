"""Storage URLs: what is refused, what is shown of one, and what is said of a database that cannot be used."""

from __future__ import annotations

import shutil
import sqlite3
import subprocess
import sys
import traceback
from pathlib import Path

import optuna
import pytest

from autoprec.errors import AutoprecError, StudyError, UsageError
from autoprec.search.database_urls import parse_url, shown_url, without_password
from autoprec.search.locks import in_turn
from autoprec.search.storage import open_storage, opened, sqlite_url, try_storage


@pytest.mark.parametrize(
    ("url", "words"),
    [("study.db", "not a database URL"), ("sqlit:///x.db", "nearest: sqlite"), ("redis://localhost", "dialects")],
)
def test_what_is_no_database_url_is_a_usage_error(url: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        open_storage(url)


SECRET_URLS = {
    "user info": "postgresql://me:s3cret@localhost:1/db",
    "query": "postgresql://me@localhost:1/db?password=s3cret",
    "key's password": "postgresql://me@localhost:1/db?sslpassword=s3cret",
    "options": "postgresql://me@localhost:1/db?options=-c%20x%3Ds3cret",
    "unknown key": "postgresql://me@localhost:1/db?token=s3cret",
    "unescaped @": "postgresql://me:p@s3cret@localhost:1/db",
    "unescaped @ and /": "postgresql://me:p@w/s3cret@localhost:1/db",
    "unescaped @ and ?": "postgresql://me:p@w?s3cret@localhost:1/db",
    "unescaped @ in a query": "postgresql://localhost:1/db?password=p@s3cret",
    "port that is none": "postgresql://me:s3cret",
    "port of another's": "postgresql://me:p@localhost:s3cret/db",
    "mysql": "mysql://me:s3cret@localhost:1/db",
    "no dialect": "me:s3cret@x",
    "no URL": "host=x password=s3cret",
    "word": "s3cret",
    "sqlite with a host": "sqlite://me:s3cret@x/db",
    "wrong dialect": "postgres://me:s3cret@localhost/db",
}


@pytest.mark.parametrize("url", SECRET_URLS.values(), ids=SECRET_URLS.keys())
def test_a_secret_is_in_no_message_and_no_traceback(url: str) -> None:
    with pytest.raises(AutoprecError) as caught:
        try_storage(url)
    assert "s3cret" not in str(caught.value)
    assert "s3cret" not in "".join(traceback.format_exception(caught.value)).replace(repr(url), "")
    assert caught.value.__context__ is None or caught.value.__suppress_context__
    assert "s3cret" not in shown_url(url)


@pytest.mark.parametrize("url", SECRET_URLS.values(), ids=SECRET_URLS.keys())
def test_no_secret_gets_onto_the_command_line_of_a_worker(url: str) -> None:
    try:
        shown, password = without_password(url)
    except UsageError as error:
        shown, password = str(error), "s3cret"
    assert "s3cret" not in shown
    assert password == "s3cret"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://me:s3cret@host/db", "postgresql://host/db"),
        ("postgresql+psycopg://me:s3cret@host:5433/db?sslmode=require", "postgresql+psycopg://host:5433/db"),
        ("postgresql://me:pa/ss@host/db", "postgresql://host/db"),
        ("postgresql://[::1]:5433/db", "postgresql://[::1]:5433/db"),
        ("sqlite:////data/me@home/study.db?timeout=3", "sqlite:////data/me@home/study.db"),
        ("::s3cret::", ""),
    ],
)
def test_of_a_url_scheme_host_port_and_database_are_shown(url: str, shown: str) -> None:
    assert shown_url(url) == shown


def test_a_url_that_cannot_be_told_from_its_password_says_how_to_write_it() -> None:
    with pytest.raises(UsageError, match=r"may hold a password.*@ : / \? # % in a password written as %40"):
        parse_url("postgresql://me:p@ss@host/db")


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("postgresql://localhost:1/db", "nothing answers at that host and port"),
        ("postgresql://no.such.host.invalid/db", "no host of that name"),
        ("sqlite:///no/such/folder/x.db", r"sqlite:///no/such/folder/x.db: cannot be opened \(no such folder"),
    ],
)
def test_why_a_database_cannot_be_opened_is_said(url: str, words: str) -> None:
    with pytest.raises(StudyError, match=words):
        try_storage(url)


def test_trying_a_file_that_is_not_there_yet_leaves_none(tmp_path: Path) -> None:
    try_storage(sqlite_url(tmp_path / "study.db"))
    assert list(tmp_path.iterdir()) == []


def test_the_storage_is_tried_before_the_task_is_built(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("from pathlib import Path\nPath('built').touch()\n")
    command = [sys.executable, "-m", "autoprec", "search", "--task", "mine.py:task", "--study-name", "s"]
    ran = subprocess.run(
        [*command, "--storage", "postgresql://me:s3cret@localhost:1/db"], cwd=tmp_path, capture_output=True, text=True
    )
    assert ran.returncode == 1
    reason = "cannot be opened (nothing answers at that host and port)"
    assert ran.stderr == f"autoprec: storage postgresql://localhost:1/db: {reason}\n"
    assert not (tmp_path / "built").exists()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database with one empty study."""
    path = tmp_path_factory.mktemp("whole") / "study.db"
    with opened(sqlite_url(path)) as storage:
        optuna.create_study(study_name="s", storage=storage)
    return path


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ("UPDATE alembic_version SET version_num = 'v2.6.0.a'", "of another Optuna"),
        ("UPDATE alembic_version SET version_num = 'v99.0.0'", "of another Optuna"),
        ("ALTER TABLE trials RENAME COLUMN state TO states", "other columns"),
    ],
    ids=["older", "newer", "a column"],
)
def test_a_study_of_another_optuna_is_one_line(damage: str, words: str, whole: Path, tmp_path: Path) -> None:
    shutil.copy(whole, path := tmp_path / "study.db")
    with sqlite3.connect(path) as database:
        database.execute(damage)
    database.close()
    with pytest.raises(StudyError, match=words), opened(sqlite_url(path)) as storage:
        optuna.load_study(study_name="s", storage=storage).get_trials()


@pytest.mark.parametrize(
    ("break_it", "words"),
    [
        (lambda storage, path: storage.delete_study(storage.get_study_id_from_name("s")), "deleted meanwhile$"),
        (lambda storage, path: _drop(path, "studies"), "a table of Optuna's is missing"),
        (lambda storage, path: _drop(path, "trials"), "a table of Optuna's is missing"),
    ],
    ids=["study deleted", "studies dropped", "trials dropped"],
)
def test_what_is_taken_away_in_the_middle_is_one_line(break_it, words: str, whole: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    shutil.copy(whole, path := tmp_path / "run" / "study.db")

    def ask_twice() -> None:
        with opened(sqlite_url(path)) as storage:
            study = optuna.load_study(study_name="s", storage=storage)
            study.ask()
            break_it(storage, path)
            study.ask()

    with pytest.raises(StudyError, match=words):
        ask_twice()


def test_a_folder_that_is_removed_in_the_middle_is_noticed_at_the_next_turn(whole: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    shutil.copy(whole, path := tmp_path / "run" / "study.db")
    with opened(sqlite_url(path)) as storage:
        with in_turn(storage, "s"):
            shutil.rmtree(path.parent)
        with pytest.raises(StudyError, match="its folder is not there any more"), in_turn(storage, "s"):
            pass


def _drop(path: Path, table: str) -> None:
    database = sqlite3.connect(path)
    database.execute(f"DROP TABLE {table}")
    database.close()
