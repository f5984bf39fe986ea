"""A file block by block, each compared with what the file's record says before anybody uses it.

Owns:    the comparison for whoever copies or checks whole files in their order.
Not:     restore (`restore/verified_read` reads several blocks at once, on several threads).
Holds:   a block that is not what the record says is never given on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from io import FileIO

from stepwell.errors import DamagedError
from stepwell.storage.format.checksum import block_digest
from stepwell.storage.format.record import FileEntry

Fill = Callable[[FileEntry, int, memoryview], None]
"""Fills a buffer with the bytes of a file of the record from an offset on. Raises OSError or DamagedError."""


def check_block(block: memoryview, file: FileEntry, number: int, label: str, *, path: str | None = None) -> None:
    """Raises DamagedError unless these are the bytes of a file's block. `path`: in the error, if not the label."""
    if block_digest(block) != file.blocks[number]:
        raise DamagedError(f"{label}: block {number} is not what its record says", path=label if path is None else path)


def verified_blocks(file: FileEntry, fill: Fill, label: str) -> Iterator[tuple[int, memoryview]]:
    """Where each block begins, and its bytes, in the same memory each time. Raises DamagedError, or as `fill` does."""
    buffer = memoryview(bytearray(min(file.nbytes, file.block_bytes)))
    for number in range(len(file.blocks)):
        start = number * file.block_bytes
        block = buffer[: min(file.block_bytes, file.nbytes - start)]
        fill(file, start, block)
        check_block(block, file, number, label)
        yield start, block


def check_blocks(file: FileEntry, fill: Fill, label: str) -> None:
    """Read all of a file. Raises DamagedError, or what `fill` does."""
    for _ in verified_blocks(file, fill, label):
        pass


def fill_from(source: FileIO, label: str) -> Fill:
    """Reads an open file, whichever its entry is called. Raises DamagedError where it is too short."""

    def fill(_: FileEntry, start: int, buffer: memoryview) -> None:
        source.seek(start)
        done = 0
        while done < len(buffer):
            got = source.readinto(buffer[done:])
            if not got:
                raise DamagedError(f"{label}: ends at byte {start + done}", path=label)
            done += got

    return fill
