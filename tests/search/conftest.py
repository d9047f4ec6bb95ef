"""Make whole searches cheap: the toy's units are found once, and its databases need not survive a power cut."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from typing import Any

import pytest
import sqlalchemy
from toys import TinyNet

import autoprec.search.plan as plan_module
from autoprec.units import Units, find_units


def _without_sync(connection: Any, _: Any) -> None:
    if isinstance(connection, sqlite3.Connection):
        connection.execute("PRAGMA synchronous=OFF")


@pytest.fixture(scope="session", autouse=True)
def cheap_storage() -> Iterator[None]:
    sqlalchemy.event.listen(sqlalchemy.Engine, "connect", _without_sync)
    yield
    sqlalchemy.event.remove(sqlalchemy.Engine, "connect", _without_sync)


@pytest.fixture(scope="session")
def tiny_units() -> dict[str, Units]:
    return {}


@pytest.fixture(scope="session", autouse=True)
def units_found_once(tiny_units: dict[str, Units]) -> Iterator[None]:
    def find(model: Any, run: Any) -> Units:
        if not isinstance(model, TinyNet):
            return find_units(model, run)
        if "tiny" not in tiny_units:
            tiny_units["tiny"] = find_units(model, run)
        return tiny_units["tiny"]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan_module, "find_units", find)
        yield
