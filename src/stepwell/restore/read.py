"""Verified bytes: every block is checked before any of it is handed on.

Owns:    reading blocks from a file (direct, several threads) or from the arena, and comparing checksums.
Not:     where the bytes go (`deliver`).
Holds:   memory use is a few blocks, whatever the size of the state; nothing unverified is delivered; a shard whose own
         header tells another story than the record is damaged.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, Protocol

from stepwell.errors import DamagedError
from stepwell.format import dtypes, shard
from stepwell.format.checksum import block_digest
from stepwell.format.record import FileEntry, LeafEntry, Record
from stepwell.store import files

Deliver = Callable[[LeafEntry, int, memoryview], None]
"""Called with a leaf, an offset inside it, and bytes. From several threads at once, for different ranges."""
THREADS: Final = 2
_PAGE: Final = 4096


class Source(Protocol):
    """Where the bytes of one file of a checkpoint come from."""

    @property
    def label(self) -> str:
        """Name for messages."""
        ...

    def read(self, start: int, nbytes: int, buffer: memoryview) -> memoryview:
        """Bytes [start, start + nbytes); may use `buffer` or return a view of its own."""
        ...

    def close(self) -> None:
        """Let go of what was opened."""
        ...


class FileSource:
    """A file on disk, read past the page cache where the file system allows it."""

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
            want = -(-(nbytes - done) // _PAGE) * _PAGE if direct else nbytes - done
            try:
                got = os.preadv(fd, [buffer[done : done + want]], start + done)
            except OSError as error:
                if not direct:
                    raise DamagedError(f"{self._path}: cannot be read: {error.strerror}", path=self.label) from error
                self._reopen()
                continue
            if got <= 0:
                raise DamagedError(f"{self._path}: ends at {start + done}", path=self.label, found=start + done)
            done = min(nbytes, done + got)
            if direct and done < nbytes and done % _PAGE:
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
    """An image in the arena of a lingering agent."""

    def __init__(self, image: memoryview, name: str) -> None:
        self._image = image
        self._name = name

    @property
    def label(self) -> str:
        return f"arena:{self._name}"

    def read(self, start: int, nbytes: int, buffer: memoryview) -> memoryview:
        return self._image[start : start + nbytes]

    def close(self) -> None:
        self._image.release()


def _flags(fd: int) -> int:
    import fcntl

    return fcntl.fcntl(fd, fcntl.F_GETFL)


def read_record_leaves(
    record: Record, open_source: Callable[[FileEntry], Source], wanted: set[str] | None, deliver: Deliver
) -> int:
    """Deliver leaves of a record (`wanted` None: all, and check every file whole). Returns the bytes read."""
    total = 0
    for number, file in enumerate(record.files):
        leaves = [leaf for leaf in record.leaves if leaf.file == number and (wanted is None or leaf.name in wanted)]
        if leaves or wanted is None:
            source = open_source(file)
            try:
                total += read_file(source, file, leaves, deliver, check_all=wanted is None)
                if wanted is None and file.kind == "safetensors":
                    check_header(source, file, leaves)
            finally:
                source.close()
    return total


def check_header(source: Source, file: FileEntry, leaves: Sequence[LeafEntry]) -> None:
    """Whether stock safetensors would find in this shard what the record says: all of its leaves, each in its place."""
    nbytes = min((leaf.start for leaf in leaves), default=file.nbytes)
    if nbytes > shard.MAX_HEADER_BYTES + 8:
        raise DamagedError(f"{source.label}: a header of {nbytes} bytes", path=source.label, found=nbytes)
    with mmap.mmap(-1, nbytes) as memory, memoryview(memory) as buffer, source.read(0, nbytes, buffer) as data:
        header = bytes(data)
    if shard.header_bytes(header, file.nbytes, path=source.label) != nbytes:
        raise DamagedError(f"{source.label}: the header does not end where the data begins", path=source.label)
    found = shard.parse_header(header, file.nbytes, path=source.label)
    for leaf in leaves:
        if found.pop(leaf.name, None) != (*dtypes.stored_as(leaf.dtype, leaf.shape), leaf.start, leaf.end):
            raise DamagedError(
                f"{source.label}: the header says otherwise about leaf {leaf.name!r} than the record",
                path=source.label,
                leaf=leaf.name,
            )
    if found:
        raise DamagedError(f"{source.label}: the record lacks leaf {min(found)!r}", path=source.label, leaf=min(found))


def read_file(
    source: Source,
    file: FileEntry,
    leaves: Sequence[LeafEntry],
    deliver: Deliver,
    *,
    check_all: bool,
    on_block: Callable[[int], None] | None = None,
) -> int:
    """Read and check blocks, and deliver the parts that belong to `leaves`. Raises DamagedError."""
    ordered = sorted((leaf for leaf in leaves if leaf.end > leaf.start), key=lambda leaf: leaf.start)
    numbers = [
        number
        for number in range(len(file.blocks))
        if check_all or _overlapping(ordered, number * file.block_bytes, (number + 1) * file.block_bytes)
    ]

    def work(part: Sequence[int]) -> int:
        done = 0
        nbytes = min(file.block_bytes, file.nbytes)
        with mmap.mmap(-1, -(-nbytes // _PAGE) * _PAGE) as memory, memoryview(memory) as buffer:
            for number in part:
                start = number * file.block_bytes
                nbytes = min(file.block_bytes, file.nbytes - start)
                with source.read(start, nbytes, buffer) as block:
                    _check(block, file, number, source)
                    for leaf in _overlapping(ordered, start, start + nbytes):
                        low, high = max(leaf.start, start), min(leaf.end, start + nbytes)
                        with block[low - start : high - start] as piece:
                            deliver(leaf, low - leaf.start, piece)
                done += nbytes
                if on_block is not None:
                    on_block(nbytes)
        return done

    if len(numbers) < 2:
        return work(numbers)
    with ThreadPoolExecutor(THREADS) as pool:
        return sum(pool.map(work, [numbers[i::THREADS] for i in range(THREADS)]))


def _check(block: memoryview, file: FileEntry, number: int, source: Source) -> None:
    found = block_digest(block)
    if found != file.blocks[number]:
        start = number * file.block_bytes
        raise DamagedError(
            f"{source.label}: bytes {start} to {start + len(block)} have checksum {found}, the record says "
            f"{file.blocks[number]}",
            path=source.label,
            expected=file.blocks[number],
            found=found,
        )


def _overlapping(ordered: Sequence[LeafEntry], start: int, end: int) -> list[LeafEntry]:
    """Leaves that touch [start, end); `ordered` by start and without overlap."""
    low, high = 0, len(ordered)
    while low < high:
        middle = (low + high) // 2
        if ordered[middle].end <= start:
            low = middle + 1
        else:
            high = middle
    found = []
    while low < len(ordered) and ordered[low].start < end:
        found.append(ordered[low])
        low += 1
    return found
