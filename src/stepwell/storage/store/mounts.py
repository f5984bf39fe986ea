"""What kind of file system a path lies on.

Not:     what follows from that (spare, passing, `agent/files/tuning`).
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Final

_SHARED: Final = (
    "nfs", "fuse", "ceph", "lustre", "cifs", "smb", "gpfs", "beegfs", "9p", "virtiofs", "afs", "gfs2", "ocfs2",
    "pvfs2", "orangefs", "panfs", "wekafs", "vboxsf", "vmhgfs",
)  # fmt: skip
"""Beginnings of their names: those that another machine, or a process, stands behind."""


def file_system_type(root: Path) -> str:
    """As the kernel calls it; `?` if it does not say."""
    return mount_of(root)[1]


def mount_of(root: Path) -> tuple[str, str]:
    """Where the file system of a path is mounted, and its type; `?` for what the kernel does not say."""
    here, found, length = os.path.realpath(root), ("?", "?"), -1
    with contextlib.suppress(OSError), open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as lines:
        for line in lines:
            fields, _, rest = line.partition(" - ")
            point = fields.split()[4].replace("\\040", " ")
            inside = here == point or here.startswith(point.rstrip("/") + "/")
            if inside and len(point) >= length:
                found, length = (point, rest.split()[0]), len(point)
    return found


def free_bytes(root: Path) -> int:
    """What this user may still write there. Raises OSError."""
    found = os.statvfs(root)
    return found.f_bavail * found.f_frsize


def is_shared(path: Path) -> bool:
    """Whether its bytes come from somewhere that may be away for a while."""
    return file_system_type(path).startswith(_SHARED)
