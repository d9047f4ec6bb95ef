"""Where an SQLite file is, and that it is not where SQLite's locks do not hold."""

from __future__ import annotations

from pathlib import Path

from autoprec.errors import UsageError
from autoprec.search.database_urls import sqlite_path

__all__ = ["refuse_network_folder"]

NETWORK_FILE_SYSTEMS = (
    "nfs", "nfs4", "cifs", "smb3", "smbfs", "lustre", "gpfs", "beegfs", "ceph", "glusterfs", "fuse.glusterfs",
    "fuse.sshfs", "fuse.s3fs", "afs", "9p", "virtiofs", "panfs", "orangefs", "wekafs", "ocfs2",
)  # fmt: skip
"""As /proc/mounts calls them. SQLite's own documentation (sqlite.org/useovernet.html) advises against each: their locks
do not hold between hosts."""
MOUNTS = Path("/proc/mounts")


def refuse_network_folder(url: str) -> None:
    """Refuse an SQLite file on a network file system.

    Raises:
        UsageError: it is on one; the file system is named.
    """
    kind = _file_system(Path(path)) if (path := sqlite_path(url)) else None
    if kind in NETWORK_FILE_SYSTEMS:
        raise UsageError(
            f"storage {Path(path or '').name}: its folder is on a network file system ({kind}), where SQLite's locks"
            " do not hold and a study can be damaged; give --storage sqlite:///FILE on a disk of this machine, or"
            " postgresql://USER@HOST/DATABASE for several machines"
        )


def _file_system(path: Path) -> str | None:
    """Return the type of the file system that a path is on; None where the system does not say."""
    try:
        lines = MOUNTS.read_text(errors="replace").splitlines()
    except OSError:
        return None
    place = path.resolve()
    found: tuple[str, str | None] = ("", None)
    for line in lines:
        _, mounted, kind, *_ = (*line.split(" "), "", "", "")
        folder = mounted.replace("\\040", " ")
        if place.is_relative_to(folder or "/nowhere") and len(folder) >= len(found[0]):
            found = (folder, kind)  # the last of equal ones is on top
    return found[1]
