"""Storage URLs: what is refused, and that no password is shown."""

from __future__ import annotations

import pytest

from autoprec.errors import AutoprecError, UsageError
from autoprec.search.storage import hide_password, open_storage


@pytest.mark.parametrize(
    ("url", "words"),
    [("study.db", "not a database URL"), ("sqlit:///x.db", "nearest: sqlite"), ("redis://localhost", "dialects")],
)
def test_what_is_no_database_url_is_a_usage_error(url: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        open_storage(url)


@pytest.mark.parametrize("url", ["postgresql://me:s3cret@nowhere/db", "mysql://me:s3cret@nowhere/db", "me:s3cret@x"])
def test_a_password_is_never_in_a_message(url: str) -> None:
    with pytest.raises(AutoprecError) as caught:
        open_storage(url)
    assert "s3cret" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_a_password_is_hidden_in_what_is_shown() -> None:
    assert hide_password("postgresql://me:s3cret@host/db") == "postgresql://me:***@host/db"
    assert "s3cret" not in hide_password("::s3cret::")


def test_a_folder_that_does_not_exist_is_one_clear_error() -> None:
    with pytest.raises(AutoprecError, match=r"sqlite:///no/such/folder/x.db: cannot be opened"):
        open_storage("sqlite:///no/such/folder/x.db")
