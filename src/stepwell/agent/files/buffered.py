"""Buffered writing that does not flood the page cache: for file systems without direct I/O, and for small pieces.

Owns:    how much may be dirty at a time, and that nothing stays behind.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
from pathlib import Path
from typing import Final

from stepwell.faults import file_operation

MOST_DIRTY: Final = 64 << 20


class BoundedCache:
    """Keeps buffered writes from filling the page cache, and from staying there. Does nothing for direct ones.

    Written bytes are synced and dropped in portions, so that at most one portion, and a write of each thread, is dirty.
    """

    def __init__(self, fd: int, path: Path) -> None:
        self._fd = fd
        self._path = path
        self.is_buffered = not fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT
        self._dirty = 0
        self._lock = threading.Lock()

    def wrote(self, nbytes: int) -> None:
        """So many bytes more. Waits for the disk when that makes a portion. Raises OSError: the file is lost then."""
        if not self.is_buffered:
            return
        with self._lock:
            self._dirty += nbytes
            if self._dirty < MOST_DIRTY:
                return
            self._dirty = 0
            file_operation("fsync", self._path)
            os.fdatasync(self._fd)
            self.drop()

    def drop(self) -> None:
        """Let go of what is synced."""
        if self.is_buffered:
            with contextlib.suppress(OSError):  # only advice
                os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)
