"""Database URLs: what one says, what of it may be shown, and what may stand on a command line."""

from __future__ import annotations

import re

from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError

from autoprec.errors import UsageError, did_you_mean

__all__ = ["DIALECTS", "dialect_of", "parse_url", "shown_url", "sqlite_path", "without_password"]

DIALECTS = ("sqlite", "postgresql", "mysql", "mariadb")

OPEN_KEYS = (
    "application_name", "charset", "client_encoding", "connect_timeout", "gssencmode", "host", "hostaddr",
    "keepalives", "keepalives_count", "keepalives_idle", "keepalives_interval", "passfile", "port",
    "sslcert", "sslcrl", "sslkey", "sslmode", "sslrootcert", "target_session_attrs", "tcp_user_timeout",
)  # fmt: skip
"""Keys of a query that hold no secret: of libpq's (its documentation, "Parameter Key Words") and of MySQL's drivers.
What is not here (`sslpassword`, `options`, `oauth_client_secret`) may hold one."""

_HOST = re.compile(r"[A-Za-z0-9._:-]*", re.ASCII)


def dialect_of(url: str) -> str:
    """Return a database URL's dialect without its driver, whether there is such a one or not."""
    return url.partition(":")[0].partition("+")[0].lower()


def parse_url(url: str) -> URL:
    """Return the parts of a database URL. What cannot be told apart from its password is in no message.

    Raises:
        UsageError: not a database URL, or of a dialect that Optuna does not store studies in.
    """
    dialect = dialect_of(url)
    if "://" not in url or dialect not in DIALECTS:
        has_dialect = re.match(r"[a-z]{1,20}(\+[a-z0-9_]{1,20})?://", url, re.IGNORECASE) is not None
        raise UsageError(
            f"storage: {f'{dialect}:// is ' if has_dialect else ''}not a database URL such as sqlite:///study.db or"
            f" postgresql://user@host/database; dialects: {', '.join(DIALECTS)}{did_you_mean(dialect, DIALECTS)}"
        )
    parsed = _parse(url)
    if parsed is None:
        hint = (
            "sqlite:///FILE is needed"
            if dialect == "sqlite"
            else f"{dialect}://USER:PASSWORD@HOST:PORT/DATABASE is needed, the port a number, and @ : / ? # % in a"
            " password written as %40 %3A %2F %3F %23 %25"
        )
        raise UsageError(f"storage: not a database URL (it is not shown, since it may hold a password): {hint}")
    return parsed


def _parse(url: str) -> URL | None:
    """Return the parts of a URL; None where they do not come apart in one way alone."""
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):  # ValueError: a port that is no number
        return None
    if parsed.get_backend_name() == "sqlite":
        return None if parsed.host or parsed.username or parsed.password or parsed.port else parsed
    # An @ in a password or in a query is where one reader ends the password and another one does not.
    is_one = url.count("@") <= 1 and re.search(r"\?.*=.*@", url) is None
    is_host = _HOST.fullmatch(parsed.host or "") is not None
    return parsed if is_one and is_host and (parsed.port is None or 0 < parsed.port < 2**16) else None


def shown_url(url: str) -> str:
    """Return scheme, host, port and database name; "" where a URL does not come apart for certain."""
    parsed = _parse(url) if dialect_of(url) in DIALECTS else None
    if parsed is None:
        return ""
    place = URL.create(parsed.drivername, host=parsed.host, port=parsed.port).render_as_string(hide_password=True)
    return place if parsed.database is None else f"{place}/{parsed.database}"


def without_password(url: str) -> tuple[str, str | None]:
    """Return the URL without its password, and that.

    Raises:
        UsageError: as `parse_url`; its query may hold another secret, which no environment variable can carry.
    """
    parsed = parse_url(url)
    query = dict(parsed.query)
    named = query.pop("password", None)
    if any(key not in OPEN_KEYS for key in query) and parsed.get_backend_name() != "sqlite":
        raise UsageError(
            f"storage {shown_url(url)}: its query may hold a secret, which would stand on the command lines of"
            f" workers; allowed there: {', '.join(OPEN_KEYS)}"
        )
    password = parsed.password if named is None else named if isinstance(named, str) else named[-1]
    bare = URL.create(parsed.drivername, parsed.username, None, parsed.host, parsed.port, parsed.database, query)
    return (url, None) if password is None else (bare.render_as_string(hide_password=False), str(password))


def sqlite_path(url: str) -> str | None:
    """Return the file of an SQLite URL; None for one in memory, another database, or no URL."""
    parsed = _parse(url) if dialect_of(url) == "sqlite" else None
    return None if parsed is None or parsed.database in (None, "", ":memory:") else parsed.database
