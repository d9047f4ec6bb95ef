"""Write files whole or not at all."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

__all__ = ["remove_unfinished", "write_atomically"]

UNFINISHED = ".autoprec-"
"""How the names of temporary files begin."""


def write_atomically(path: str | os.PathLike[str], text: str) -> None:
    """Write `text` (UTF-8) to `path` through a temporary file beside it: the old or the new content, never a part."""
    target = Path(path)
    temporary = target.parent / f"{UNFINISHED}{secrets.token_hex(8)}.tmp"  # short, where the target's name may be long
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)  # less what the umask takes
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        if target.exists():
            os.chmod(temporary, target.stat().st_mode & 0o777)
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def remove_unfinished(folder: Path) -> None:
    """Remove what `write_atomically` left in a folder when it was killed; nobody may be writing there."""
    for path in folder.glob(f"{UNFINISHED}*.tmp"):
        path.unlink(missing_ok=True)
