"""Where a SQLite ledger may lie: on a local disk that exists and can be written.

SQLite's write-ahead log is shared memory between processes of one host. On a network file system
two hosts would each believe they hold the lock, and the ledger would hand one machine to two jobs.

Not here: what is inside the file (``schema``).
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from everstep.ledger.errors import LedgerError

MOUNTINFO = Path("/proc/self/mountinfo")
_NETWORK = """
    nfs nfs4 cifs smb3 smbfs ncpfs afs coda ceph lustre gpfs beegfs glusterfs orangefs pvfs2 ocfs2
    gfs2 davfs wekafs
"""
_NETWORK_FUSE = """
    sshfs glusterfs s3fs goofys gcsfuse blobfuse blobfuse2 ceph ceph-fuse juicefs alluxio rclone
    davfs2 curlftpfs cvmfs2 moosefs mfs seaweedfs smbnetfs hdfs fuse_dfs
"""
NETWORK_FILESYSTEMS = frozenset(
    [*_NETWORK.split(), *(f"fuse.{name}" for name in _NETWORK_FUSE.split())]
)
"""File systems that more than one host can write to."""


def filesystem_of(path: Path, mountinfo: Path = MOUNTINFO) -> str | None:
    """Type of the file system that ``path`` lies on, or None where the system does not say."""
    try:
        lines = mountinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    resolved = path.resolve()
    best: tuple[int, str | None] = (-1, None)
    for line in lines:
        fields = line.split(" ")
        if "-" not in fields[6:] or len(fields) < fields.index("-", 6) + 2:
            continue
        mount_point = Path(re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), fields[4]))
        # On equal length the later line wins: it is mounted over the earlier one.
        if resolved.is_relative_to(mount_point) and len(mount_point.parts) >= best[0]:
            best = (len(mount_point.parts), fields[fields.index("-", 6) + 1])
    return best[1]


def check_place(path: Path, mountinfo: Path = MOUNTINFO) -> None:
    """Refuse a place where a SQLite ledger cannot or must not be.

    Raises:
        LedgerError: with the reason and what would be accepted.
    """
    folder = path.parent
    if not folder.is_dir():
        raise LedgerError(
            f"ledger {path}: the directory {folder} does not exist; create it or name another place"
        )
    if path.is_dir():
        raise LedgerError(f"ledger {path}: is a directory; name a file in it")
    if path.exists() and not path.is_file():
        raise LedgerError(f"ledger {path}: is not a regular file")
    kind = filesystem_of(path, mountinfo)
    if kind in NETWORK_FILESYSTEMS:
        raise LedgerError(
            f"ledger {path}: lies on a network file system ({kind}), where SQLite cannot lock; "
            "use a local disk, or PostgreSQL (postgresql://...) to share a ledger between hosts"
        )
    if not os.access(folder, os.W_OK | os.X_OK):
        raise LedgerError(f"ledger {path}: the directory {folder} cannot be written")
    if path.exists() and not os.access(path, os.R_OK | os.W_OK):
        raise LedgerError(f"ledger {path}: the file cannot be read and written")
