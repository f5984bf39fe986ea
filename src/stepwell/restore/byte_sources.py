"""Where the bytes of a checkpoint's files come from: a file, read directly, or the arena.

Owns:    opening a file, reading a range of it into page-aligned memory, how many threads each source rewards.
Not:     checking the bytes (verified_read), files in a bucket (from_disk).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
import threading
from pathlib import Path
from typing import Final, Protocol

from stepwell.errors import DamagedError
from stepwell.handover.memory import PAGE, whole_pages
from stepwell.storage.store import files
from stepwell.storage.store.passing_errors import intact

FILE_THREADS: Final = 4
"""Direct reads want a queue. Measured: 1.3 GB/s by one thread, 1.1 to 2.1 by two, 1.5 to 1.9 by 4, 8 or 16."""


MEMORY_THREADS: Final = 12
"""At most, and no more than cores. Measured on 16: 8 threads 23 GB/s to a device, 12 threads 27, 16 threads 26: each
waits for the interpreter's lock a few times a block.
"""


class BlockSource(Protocol):
    """Where the bytes of one file of a checkpoint come from."""

    @property
    def label(self) -> str:
        """Name for messages."""
        ...

    @property
    def threads(self) -> int:
        """How many readers at a time it rewards."""
        ...

    def read(self, start: int, nbytes: int, buffer: memoryview) -> memoryview:
        """Read [start, start + nbytes) into `buffer`, which begins and ends on a page; returns the part that counts."""
        ...

    def close(self) -> None:
        """Let go of what was opened."""
        ...


class FileSource:
    """A file on disk, read past the page cache where the file system allows it."""

    threads = FILE_THREADS

    def __init__(self, path: Path) -> None:
        self._path = path
        fd = files.open_regular(path, direct=True)
        self._fds = [fd]
        self._open = (fd, bool(os.O_DIRECT & _flags(fd)))
        self._lock = threading.Lock()

    @property
    def label(self) -> str:
        return str(self._path)

    def read(self, start: int, nbytes: int, buffer: memoryview) -> memoryview:
        done = 0
        while done < nbytes:
            fd, direct = self._open
            want = whole_pages(nbytes - done) if direct else nbytes - done
            view, at = [buffer[done : done + want]], start + done
            try:
                got = os.preadv(fd, view, at)
            except OSError:
                if direct:
                    self._reopen()
                    continue
                got = intact(self._path, "cannot be read", functools.partial(os.preadv, fd, view, at))
            if got <= 0:
                raise DamagedError(f"{self._path}: ends at {start + done}", path=self.label, found=start + done)
            done = min(nbytes, done + got)
            if direct and done < nbytes and done % PAGE:
                self._reopen()
        return buffer[:nbytes]

    def _reopen(self) -> None:
        """A file system that opens with O_DIRECT and then cannot read so. Other threads may still use the first one."""
        with self._lock:
            if self._open[1]:
                self._fds.append(files.open_regular(self._path))
                self._open = (self._fds[-1], False)

    def close(self) -> None:
        for fd in self._fds:
            os.close(fd)


class MemorySource:
    """An image in the arena of a lingering agent.

    Read through the descriptor: a new mapping would be faulted in page by page, for one pass over the bytes.
    """

    def __init__(self, fd: int, start: int, nbytes: int, name: str) -> None:
        self._fd, self._start, self._nbytes, self._name = fd, start, nbytes, name

    @property
    def label(self) -> str:
        return f"arena:{self._name}"

    @property
    def threads(self) -> int:
        return min(MEMORY_THREADS, len(os.sched_getaffinity(0)))

    def read(self, start: int, nbytes: int, buffer: memoryview) -> memoryview:
        done, end = 0, min(nbytes, self._nbytes - start)
        while done < nbytes:
            try:
                got = os.preadv(self._fd, [buffer[done:end]], self._start + start + done) if done < end else 0
            except OSError as error:
                raise DamagedError(f"{self.label}: cannot be read: {error.strerror}", path=self.label) from error
            if got <= 0:
                raise DamagedError(f"{self.label}: ends at {start + done}", path=self.label, found=start + done)
            done += got
        return buffer[:nbytes]

    def close(self) -> None:
        """The arena stays open: it is its owner's."""


def _flags(fd: int) -> int:
    import fcntl

    return fcntl.fcntl(fd, fcntl.F_GETFL)


class ReadBuffer:
    """Memory that begins on a page, as direct reading wants it, and that forked children do not get."""

    def __init__(self, nbytes: int, *, huge: bool = False) -> None:
        self.nbytes = whole_pages(nbytes)
        self.memory = mmap.mmap(-1, self.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.memory.madvise(mmap.MADV_DONTFORK)
        if huge:
            with contextlib.suppress(OSError):  # a kernel built without them
                self.memory.madvise(mmap.MADV_HUGEPAGE)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.view = memoryview(self.memory)

    def close(self) -> None:
        """Give the memory back. A view somebody still holds keeps it until it is gone."""
        self.view.release()
        with contextlib.suppress(BufferError):
            self.memory.close()
