"""Checksums: xxh3 over blocks of a file, and over the canonical JSON of a record.

A block checksum finds any flipped bit or truncation, and says where. It is no defence against a forger.
"""

from __future__ import annotations

from typing import Final

import xxhash

BLOCK_BYTES: Final = 4 << 20
"""How many bytes of a file share one checksum; also the unit of reading and writing."""
PART_BYTES: Final = 1 << 20
"""The same for the file of one of many ranks: another number of ranks reads parts of it, and each part whole blocks."""


def block_digest(data: bytes | bytearray | memoryview) -> str:
    """16 hex digits for one block. Releases the interpreter lock for large blocks."""
    return f"{xxhash.xxh3_64_intdigest(data):016x}"


def document_digest(data: bytes) -> str:
    """32 hex digits for a whole small file."""
    return f"{xxhash.xxh3_128_intdigest(data):032x}"


class BlockHasher:
    """Checksums of the blocks of a file that comes in pieces of any size."""

    def __init__(self, block_bytes: int = BLOCK_BYTES) -> None:
        self._block_bytes = block_bytes
        self._digests: list[str] = []
        self._hash = xxhash.xxh3_64()
        self._filled = 0

    def update(self, data: memoryview) -> None:
        """The next bytes of the file."""
        while data:
            piece = data[: self._block_bytes - self._filled]
            self._hash.update(piece)
            self._filled += len(piece)
            if self._filled == self._block_bytes:
                self._end_block()
            data = data[len(piece) :]

    def _end_block(self) -> None:
        self._digests.append(f"{self._hash.intdigest():016x}")
        self._hash, self._filled = xxhash.xxh3_64(), 0

    def finish(self) -> tuple[str, ...]:
        """That was all: the checksums of all blocks."""
        if self._filled:
            self._end_block()
        return tuple(self._digests)


def block_count(nbytes: int, block_bytes: int) -> int:
    """How many blocks a file of this size has."""
    return -(-nbytes // block_bytes)
