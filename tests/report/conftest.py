"""One small stored study for all tests of the report."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import sqlalchemy
from stored_study import store_study


@pytest.fixture(scope="session")
def stored_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a small search; not to be written to. Its database need not survive a power cut."""

    def without_sync(connection: object, _: object) -> None:
        connection.execute("PRAGMA synchronous=OFF")  # type: ignore[attr-defined]

    folder = tmp_path_factory.mktemp("stored") / "tiny"
    sqlalchemy.event.listen(sqlalchemy.Engine, "connect", without_sync)
    try:
        store_study(folder)
    finally:
        sqlalchemy.event.remove(sqlalchemy.Engine, "connect", without_sync)
    return folder


@pytest.fixture
def own_folder(stored_folder: Path, tmp_path: Path) -> Path:
    """Return a copy of that folder, which a test may change."""
    return Path(shutil.copytree(stored_folder, tmp_path / "tiny"))
