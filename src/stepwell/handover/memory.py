"""The arena: anonymous shared memory for snapshots, held by trainer and agent alike.

Owns:    the memfd, its mapping, the slot headers, and how much memory may be taken.
Not:     what the bytes of a slot mean (a slot is the exact image of a shard file).
Holds:   no name anywhere, so nothing to leak: the kernel frees it when both processes are gone; not inherited by
         forked children; pages are reserved up front, so a full machine shows as an error and never as a bus error;
         a slot is complete only when sequence and verdict both carry its number.

    page 0                     header: 64 bytes per slot
    slot 0, slot 1, ...        images of the live shard file
    frozen                     image of the file of leaves that do not change
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

PAGE: Final = 4096
HEADER_BYTES: Final = PAGE
MAX_SLOTS: Final = 8
FROZEN: Final = MAX_SLOTS
"""Index of the frozen image in the header."""
_STRIDE: Final = 64
_VOID: Final = 1 << 63
_WORD: Final = struct.Struct("<Q")
_SEQUENCE, _VERDICT, _SUSPECTS, _FIRST, _FILLING, _FILLED = 0, 8, 16, 24, 32, 40
_MADV_POPULATE_WRITE: Final = 23
_STRETCH: Final = 16 << 20
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class ArenaShape:
    """How an arena is divided. Slot sizes are whole pages."""

    generation: int
    slots: int
    slot_bytes: int
    frozen_bytes: int

    @property
    def nbytes(self) -> int:
        """Size of the whole memory."""
        return HEADER_BYTES + self.slots * self.slot_bytes + self.frozen_bytes

    def start(self, index: int) -> int:
        """Where a slot's image begins."""
        return HEADER_BYTES + (self.slots if index == FROZEN else index) * self.slot_bytes


@dataclass(frozen=True)
class Suspects:
    """How many leaves hold non-finite values, and the number of the first."""

    leaves: int
    first: int


class Arena:
    """One arena, mapped into this process. Made by `allocate` (trainer) or `attach` (agent, successor)."""

    def __init__(self, fd: int, shape: ArenaShape, memory: mmap.mmap) -> None:
        self.fd = fd
        self.shape = shape
        self.memory = memory
        self.view = memoryview(memory)

    @classmethod
    def allocate(cls, shape: ArenaShape) -> Arena:
        """Reserve the memory. Raises OSError (ENOMEM, ENOSPC) if there is not enough; takes time: 2 to 3 GB/s."""
        if shape.nbytes > available_bytes():  # the kernel would not refuse: it takes page after page, then kills
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        fd = os.memfd_create("stepwell-arena", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(fd, 0, shape.nbytes)
            return cls.attach(fd, shape)
        except OSError:
            os.close(fd)
            raise

    @classmethod
    def attach(cls, fd: int, shape: ArenaShape) -> Arena:
        """Map an arena whose descriptor came from another process."""
        if os.fstat(fd).st_size < shape.nbytes:
            raise OSError(f"arena of {os.fstat(fd).st_size} bytes, expected {shape.nbytes}")
        memory = mmap.mmap(fd, shape.nbytes)
        memory.madvise(mmap.MADV_DONTFORK)  # loader workers must neither hold nor copy it
        return cls(fd, shape, memory)

    def address(self) -> int:
        """Address of the mapping in this process."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self.memory))

    def fault_in(self, part: int = 0, parts: int = 1) -> None:
        """Map all pages now (or every n-th stretch of them), so that the first snapshot does not.

        Stretch by stretch: the kernel keeps other threads from mapping memory meanwhile, and a driver does that often.
        """
        for start in range(part * _STRETCH, self.shape.nbytes, parts * _STRETCH):
            length = min(_STRETCH, self.shape.nbytes - start)
            _libc.madvise(ctypes.c_void_p(self.address() + start), ctypes.c_size_t(length), _MADV_POPULATE_WRITE)

    def image(self, index: int, nbytes: int) -> memoryview:
        """The first `nbytes` of a slot."""
        start = self.shape.start(index)
        return self.view[start : start + nbytes]

    def _put(self, index: int, word: int, value: int) -> None:
        _WORD.pack_into(self.memory, index * _STRIDE + word, value)

    def _get(self, index: int, word: int) -> int:
        value: int = _WORD.unpack_from(self.memory, index * _STRIDE + word)[0]
        return value

    def claim(self, index: int) -> None:
        """Forget what a slot held, before its bytes are overwritten."""
        for word in (_FILLING, _FILLED, _SEQUENCE, _VERDICT, _SUSPECTS, _FIRST):
            self._put(index, word, 0)

    def set_filled(self, index: int, sequence: int, nbytes: int) -> None:
        """The first `nbytes` of the image are final, should the snapshot count: they may be written already."""
        self._put(index, _FILLED, nbytes)
        self._put(index, _FILLING, sequence)

    def filled(self, index: int, sequence: int) -> int:
        """How much of a snapshot's image is final so far."""
        return self._get(index, _FILLED) if self._get(index, _FILLING) == sequence else 0

    def set_suspects(self, index: int, leaves: int, first: int) -> None:
        """Note non-finite leaves. Must come before `set_sequence`."""
        self._put(index, _FIRST, first)
        self._put(index, _SUSPECTS, leaves)

    def set_sequence(self, index: int, sequence: int) -> None:
        """All bytes are there. On CUDA the copy stream writes this word itself, last."""
        self._put(index, _SEQUENCE, sequence)

    def set_verdict(self, index: int, sequence: int, *, is_good: bool) -> None:
        """The guard has looked: the snapshot counts, or is void."""
        self._put(index, _VERDICT, sequence if is_good else sequence | _VOID)

    def is_complete(self, index: int, sequence: int) -> bool:
        """Bytes and verdict are both in."""
        return self._get(index, _SEQUENCE) == sequence and self._get(index, _VERDICT) == sequence

    def is_void(self, index: int, sequence: int) -> bool:
        """The guard threw it away, or the slot was claimed for another snapshot."""
        return self._get(index, _VERDICT) == sequence | _VOID

    def suspects(self, index: int) -> Suspects:
        """What was noticed about the slot's values."""
        return Suspects(self._get(index, _SUSPECTS), self._get(index, _FIRST))

    def close(self) -> None:
        """Let go of the memory. A view somebody still holds keeps the mapping until it is gone."""
        self.view.release()
        with contextlib.suppress(BufferError):  # a view is left: unmapped when it is collected
            self.memory.close()
        os.close(self.fd)


def available_bytes() -> int:
    """Host memory that can be taken without pushing the machine, or this cgroup, into trouble."""
    with open("/proc/meminfo") as file:
        found = next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable"))
    for directory, limit, used, cache in _cgroups():
        try:
            room = int((directory / limit).read_text()) - int((directory / used).read_text())
            statistics = dict(line.split() for line in (directory / "memory.stat").read_text().splitlines())
            found = min(found, room + int(statistics.get(cache, 0)))  # the kernel takes file cache back first
        except (OSError, ValueError):
            continue  # no such controller or directory, or no limit ("max")
    return max(0, found)


def _cgroups() -> Iterator[tuple[Path, str, str, str]]:
    """Directories of the memory cgroups this process is in, its own first, and the names of their files."""
    mount = Path("/sys/fs/cgroup")
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, own = line.split(":", 2)
        relative = Path(own.lstrip("/"))
        for part in (relative, *relative.parents):  # a limit further up holds too; a container may see only the top
            if controllers == "memory":
                names = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
                yield mount / "memory" / part, *names
            elif not controllers:
                yield mount / part, "memory.max", "memory.current", "inactive_file"


def whole_pages(nbytes: int) -> int:
    """Round up to pages."""
    return -(-nbytes // PAGE) * PAGE
