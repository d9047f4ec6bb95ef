"""What is needed beside the plain installation, said before it is missed."""

from __future__ import annotations

import importlib.util

from autoprec.errors import UsageError

__all__ = ["require_extra"]


def require_extra(extra: str, *packages: str) -> None:
    """Check that the packages of an optional extra can be imported; imports none of them.

    Raises:
        UsageError: one is not installed.
    """
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        raise UsageError(f"{', '.join(missing)} is not installed; install it with: pip install 'autoprec[{extra}]'")
