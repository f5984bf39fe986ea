"""Records applied together: their symbols are unpacked a stretch at a time, and moved on from there, by all cores.

Owns:    the order in which symbols are unpacked and the state is moved on.
Before:  `parts` read what each record says of a part.   After: `replay` takes the digest of the state.
Holds:   each entry is moved on by one record after the other, as if each had been applied by itself. Memory is that of
         a few tiles, whatever the size of the state: what a record says of all of it is never unpacked at once.

A tile is a stretch of the state with what every record says of it. One that was unpacked is moved on, in pieces that do
not touch each other, while the next one is unpacked, a record in each thread: neither waits for the other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np

from stepwell.storage.chain.apply_threads import Crew
from stepwell.storage.codecs.assignment import CodedPart
from stepwell.storage.codecs.floats import Bytes, Floats
from stepwell.storage.codecs.quantise import STRETCH, Decoder, Scratch, decode, packed_nbytes
from stepwell.storage.codecs.tables import QuantiserTable

PIECE: Final = STRETCH
"""Entries that one thread moves on by all records, while they are in the cache."""
_TILE_NBYTES: Final = 64 << 20
"""Packed symbols of all records. A tile is at least one piece."""
MOST_NBYTES: Final = 4 << 20
"""Of memory for one record, its part of three tiles and what zstd looks back at, if records are many."""


class Symbols(Protocol):
    """Packed symbols of one record, from front to end. Raises DamagedError."""

    def fill(self, room: memoryview) -> None:
        """The next ones."""
        ...


class Unpacked:
    """Symbols that a code gives all at once, when the first are asked for."""

    def __init__(self, unpack: Callable[[], Bytes]) -> None:
        self._unpack, self._found, self._at = unpack, np.empty(0, np.uint8), 0

    def fill(self, room: memoryview) -> None:
        if not self._at:
            self._found = self._unpack()
        room[:] = self._found[self._at : self._at + len(room)].data
        self._at += len(room)


class AppliedRecord(Protocol):
    """What a record says of a part. coded: tables of the groups that have symbols. exact: values of others."""

    @property
    def coded(self) -> Mapping[int, QuantiserTable]: ...

    @property
    def exact(self) -> Mapping[int, memoryview]: ...

    def open(self) -> Symbols:
        """Its symbols."""
        ...


@dataclass(frozen=True)
class _Piece:
    """Entries from `start` on in the part, which are those from `first` on in their group. nbytes: of their symbols."""

    group: int
    start: int
    size: int
    first: int
    nbytes: int


Lines = list[tuple[_Piece, list[Bytes | None]]]
"""Pieces, and of each the packed symbols that records have for it."""


def move_on(part: CodedPart, records: Sequence[AppliedRecord], state: Floats, bits: int, threads: int) -> None:
    """Apply records to a part. Raises DamagedError; what the state holds then is of no use."""
    tiles = list(_tiles(part, bits, _TILE_NBYTES // max(1, len(records))))
    symbols = [record.open() for record in records]
    lookups: dict[int, Decoder] = {}
    moving: deque[list[Future[None]]] = deque()

    def unpack(tile: list[_Piece]) -> list[Future[Bytes]]:
        pairs = zip(symbols, records, strict=True)
        return [crew.submit(_take, source, _needed(record, tile)) for source, record in pairs]

    with Crew(threads) as crew:
        ahead = unpack(tiles[0]) if tiles else []
        for number, tile in enumerate(tiles):
            lines = _share_out(tile, records, [each.result() for each in ahead])
            # Asked for before this tile is moved on, so that there is always something left to do.
            ahead = unpack(tiles[number + 1]) if number + 1 < len(tiles) else []
            _forget(lookups, records, tile)
            moving.append([crew.submit(_move, records, *line, state, bits, lookups) for line in lines])
            if len(moving) > 1:
                _wait(moving.popleft())
        while moving:
            _wait(moving.popleft())


def _tiles(part: CodedPart, bits: int, most_nbytes: int) -> Iterator[list[_Piece]]:
    tile: list[_Piece] = []
    nbytes = 0
    for number, slots in enumerate(part.groups()):
        first = 0
        for slot in slots:
            for start in range(0, slot.leaf.count, PIECE):
                size = min(PIECE, slot.leaf.count - start)
                piece = _Piece(number, slot.start + start, size, first + start, packed_nbytes(size, bits))
                if tile and nbytes + piece.nbytes > most_nbytes:
                    yield tile
                    tile, nbytes = [], 0
                tile.append(piece)
                nbytes += piece.nbytes
            first += slot.leaf.count
    if tile:
        yield tile


def _needed(record: AppliedRecord, tile: list[_Piece]) -> int:
    return sum(piece.nbytes for piece in tile if piece.group in record.coded)


def _take(source: Symbols, nbytes: int) -> Bytes:
    room = np.empty(nbytes, np.uint8)
    if nbytes:
        source.fill(room.data)
    return room


def _share_out(tile: list[_Piece], records: Sequence[AppliedRecord], packed: Sequence[Bytes]) -> Lines:
    at = [0] * len(records)
    lines: Lines = []
    for piece in tile:
        line: list[Bytes | None] = []
        for number, record in enumerate(records):
            if piece.group in record.coded:
                line.append(packed[number][at[number] : at[number] + piece.nbytes])
                at[number] += piece.nbytes
            else:
                line.append(None)
        lines.append((piece, line))
    return lines


def _forget(lookups: dict[int, Decoder], records: Sequence[AppliedRecord], tile: list[_Piece]) -> None:
    """Those of tables that neither this tile nor, as groups come in order, a later one needs."""
    groups = {piece.group for piece in tile}
    needed = {id(record.coded[group]) for record in records for group in groups if group in record.coded}
    for known in list(lookups):
        if known not in needed:
            lookups.pop(known, None)


def _move(records: Sequence[AppliedRecord], piece: _Piece, line: list[Bytes | None], state: Floats, bits: int,
          lookups: dict[int, Decoder]) -> None:  # fmt: skip
    """A piece by all records, one after the other."""
    place, is_wide = state[piece.start : piece.start + piece.size], piece.size == PIECE
    due: list[tuple[Decoder, Bytes]] = []
    own: dict[int, Decoder] = lookups if is_wide else {}
    for record, packed in zip(records, line, strict=True):
        if packed is not None:
            table = record.coded[piece.group]
            known = own.get(id(table))
            if known is None:  # another thread may make the same: one of them stays
                known = own[id(table)] = Decoder(table, bits, is_wide=is_wide)
            due.append((known, packed))
        elif piece.group in record.exact:  # whatever came before
            due, exact = [], record.exact[piece.group][4 * piece.first : 4 * (piece.first + piece.size)]
            place[:] = np.frombuffer(exact, np.float32)
    decode(place, due, Scratch(bits, is_wide=is_wide))


def _wait(moving: list[Future[None]]) -> None:
    for each in moving:
        each.result()
