"""A rank's shard as one run of bytes, its files one after the other, each block verified before any of it is used.

Owns:    where in which file a byte lies, and checking what was read against the record.
Holds:   a wrong byte never leaves here: parity made of it would spoil what is rebuilt from that.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

from stepwell.storage.format.record import FileEntry
from stepwell.storage.store.blocks import Fill, check_block


class Logical:
    """Reads, mostly forward: the block read last is kept. Not for several threads."""

    def __init__(self, files: Sequence[FileEntry], fill: Fill, label: str) -> None:
        self._files = [file for file in files if file.nbytes]
        self._starts = [0, *accumulate(file.nbytes for file in self._files)]
        self._fill, self._label = fill, label
        self._room = bytearray(max((min(file.block_bytes, file.nbytes) for file in self._files), default=0))
        self._kept: tuple[int, int] | None = None

    @property
    def nbytes(self) -> int:
        return self._starts[-1]

    def read(self, start: int, nbytes: int, into: memoryview) -> None:
        """Fill `into`. Raises DamagedError, or what `fill` raises."""
        done = 0
        while done < nbytes:
            number = bisect_right(self._starts, start + done) - 1
            file, offset = self._files[number], start + done - self._starts[number]
            block = self._block(number, offset // file.block_bytes)
            low = offset % file.block_bytes
            count = min(nbytes - done, len(block) - low)
            into[done : done + count] = block[low : low + count]
            done += count

    def _block(self, number: int, at: int) -> memoryview:
        file = self._files[number]
        start = at * file.block_bytes
        view = memoryview(self._room)[: min(file.block_bytes, file.nbytes - start)]
        if self._kept != (number, at):
            self._kept = None
            self._fill(file, start, view)
            check_block(view, file, at, f"{self._label}/{file.name}", path=file.name)
            self._kept = (number, at)
        return view
