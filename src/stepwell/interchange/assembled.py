"""A checkpoint of many ranks, as each of them holds it: tensors put together from the parts that the ranks stored.

Owns:    which bytes of which rank's files make up a range of a whole tensor.
Holds:   every byte was checked against its checksum; a few megabytes are held, whatever the size of the tensors (but
         never less than one row).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from stepwell.errors import DamagedError
from stepwell.format import dtypes
from stepwell.format.box import Box
from stepwell.format.record import FileEntry, LeafEntry, Record
from stepwell.interchange.compare import BlockReader
from stepwell.restore.read import FileSource, Source
from stepwell.restore.whole import Fetch, Part, Whole

_ROOM_BYTES: Final = 4 << 20


class Assembled:
    """One rank's view of a checkpoint: its own values, tensors that are its own, and whole ones of all ranks."""

    def __init__(self, records: Sequence[Record], directory: Path, rank: int) -> None:
        def open_source(file: FileEntry) -> Source:
            return FileSource(directory / file.name)

        self._whole = Whole([Part(record, open_source) for record in records], rank)
        self.record = records[rank]
        self.entries = {name: _as_whole(leaf) for name, leaf in self._whole.leaves.items()}
        self._readers = [BlockReader(record, directory) for record in records]
        self._held: tuple[str, int, bytes] | None = None

    def read(self, leaf: LeafEntry, offset: int, nbytes: int) -> bytes:
        """Bytes [offset, offset + nbytes) of a whole tensor. Raises DamagedError."""
        row_bytes = (leaf.end - leaf.start) // max(1, Box.whole(leaf.shape).row_count)
        room_bytes = max(1, _ROOM_BYTES // max(1, row_bytes)) * row_bytes
        parts = []
        while nbytes:
            number, inside = divmod(offset, room_bytes)
            part = self._room(leaf, number, room_bytes // row_bytes)[inside : inside + nbytes]
            parts.append(part)
            offset, nbytes = offset + len(part), nbytes - len(part)
        return b"".join(parts)

    def _room(self, leaf: LeafEntry, number: int, rows: int) -> bytes:
        if self._held is None or self._held[:2] != (leaf.name, number):
            whole = Box.whole(leaf.shape)
            box = whole.rows(number * rows, min(whole.row_count, (number + 1) * rows))
            self._held = leaf.name, number, self._box(leaf, box)
        return self._held[2]

    def _box(self, leaf: LeafEntry, box: Box) -> bytes:
        itemsize = dtypes.itemsize(leaf.dtype)
        room = bytearray(box.numel * itemsize)
        for part, fetches in self._whole.plan({leaf.name: box}):
            for fetch in fetches:
                reader = self._readers[part.record.owner.rank]
                found = reader.read(fetch.entry, 0, fetch.entry.end - fetch.entry.start)
                _place(room, box.shape, found, fetch, itemsize)
        return bytes(room)

    def close(self) -> None:
        """Close the files."""
        for reader in self._readers:
            reader.close()


def _as_whole(leaf: LeafEntry) -> LeafEntry:
    shape = leaf.shape if leaf.private else leaf.global_shape
    size = dtypes.element_count(shape) * dtypes.itemsize(leaf.dtype)
    return replace(leaf, shape=shape, offsets=(0,) * len(shape), start=0, end=size, file=0)


def _place(room: bytearray, shape: tuple[int, ...], found: bytes, fetch: Fetch, itemsize: int) -> None:
    """Copy what is needed of the rows that were read into its place, run by run."""
    runs = zip(_runs(fetch.entry.shape, fetch.needed), _runs(shape, fetch.target), strict=True)
    length = (fetch.needed.shape[-1] if fetch.needed.shape else 1) * itemsize
    if fetch.is_whole and fetch.target.shape[1:] == shape[1:]:  # whole rows: one run
        start = next(_runs(shape, fetch.target), 0) * itemsize
        room[start : start + len(found)] = found
        return
    for source, target in runs:
        room[target * itemsize : target * itemsize + length] = found[source * itemsize : source * itemsize + length]


def _runs(shape: tuple[int, ...], box: Box) -> Iterator[int]:
    """Where the elements of a box lie in a tensor of this shape: the start of each run along the last dimension."""
    if not box.numel:
        return
    strides = [math.prod(shape[place + 1 :]) for place in range(len(shape))]
    if len(shape) == 0:
        yield 0
        return
    sizes = box.shape[:-1]
    for number in range(math.prod(sizes)):
        place, rest = box.offsets[-1], number
        for axis in reversed(range(len(sizes))):
            rest, inside = divmod(rest, sizes[axis])
            place += (box.offsets[axis] + inside) * strides[axis]
        yield place


def assembled(records: Sequence[Record], directory: Path) -> list[Assembled]:
    """Each rank's view. Raises DamagedError if the records do not belong together."""
    if [record.owner.rank for record in records] != list(range(len(records))):
        raise DamagedError(f"{directory}: records of ranks are missing", path=str(directory))
    return [Assembled(records, directory, rank) for rank in range(len(records))]
