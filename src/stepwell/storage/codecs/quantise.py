"""The second pass: differences to packed symbols, and the reader's state moved on by what the symbols stand for.

Owns:    packing, and the one way a state changes: writer and reader add what the packed bytes say, by the same code.
Before:  `tables`.   After: `frames` or `huffman` make the packed symbols smaller.
Holds:   the state after `encode` is bit for bit the state after `decode` of its bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from stepwell.storage.codecs.floats import MOST_EXPONENT, AnyArray, Bytes, Floats, is_finite
from stepwell.storage.codecs.histogram import CHUNK, Piece, chunks, difference
from stepwell.storage.codecs.tables import QuantiserTable, Rooms

_LIMIT: Final = 2.0 ** (MOST_EXPONENT + 1 - 127)
STRETCH: Final = 4 * CHUNK
"""Entries that are decoded at once. Of fewer, threads wait for the interpreter's lock; of more, the cache is full."""
_WIDE: Final = {1: np.float32, 2: np.complex64, 4: np.complex128}
"""Types that hold so many floats, for moving them as one."""


@dataclass
class Outcome:
    """Of one group. `kept`: how many entries got a symbol. `is_sound`: differences could be coded, the state is finite.
    `largest`: the largest difference.
    """

    kept: int = 0
    is_sound: bool = True
    largest: float = 0.0


def packed_nbytes(count: int, bits: int) -> int:
    """Bytes of a leaf's packed symbols; each leaf begins with a byte of its own."""
    return -(-count * bits // 8)


def pack(codes: Bytes, bits: int, out: Bytes) -> None:
    """Symbols, first ones in the low bits. The number of codes is a multiple of 8 / bits."""
    if bits == 8:
        out[:] = codes
    elif bits == 4:
        pairs = codes.view(np.uint16)
        np.copyto(out, pairs | (pairs >> np.uint16(4)), casting="unsafe")
    else:
        fours = codes.view(np.uint32)
        joined = fours | (fours >> np.uint32(6)) | (fours >> np.uint32(12)) | (fours >> np.uint32(18))
        np.copyto(out, joined, casting="unsafe")


def unpack(packed: Bytes, bits: int) -> Bytes:
    """The symbols, with those that pad the last byte."""
    if bits == 8:
        return np.array(packed, np.uint8)
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    codes: Bytes = (packed[:, None] >> shifts) & np.uint8((1 << bits) - 1)
    return np.ascontiguousarray(codes).reshape(-1)


class Scratch:
    """Memory for what is looked up, of at most `most` entries at a time."""

    def __init__(self, bits: int, most: int = STRETCH, *, is_wide: bool = True) -> None:
        each = _each(bits, is_wide)
        self.bits, self.most = bits, most
        self.indices = np.empty(-(-most // each), np.intp)
        self.found: AnyArray = np.empty(-(-most // each), _WIDE[each])


class Decoder:
    """What packed symbols add, looked up several at a time as one wide number. is_wide: by a table of up to a megabyte,
    for many symbols; else by a small one.
    """

    def __init__(self, table: QuantiserTable, bits: int, *, is_wide: bool = True) -> None:
        each = _each(bits, is_wide)
        self._word = np.dtype(np.uint8 if bits * each == 8 else np.uint16)
        self._lookup: AnyArray = look_up(table, bits, each).reshape(-1).view(_WIDE[each])

    def add(self, packed: Bytes, state: Floats, room: Scratch) -> None:
        """Move a stretch of the state on. Overflow and NaN are for the caller to see, without a warning."""
        words = (packed if packed.size % self._word.itemsize == 0 else np.append(packed, np.uint8(0))).view(self._word)
        indices, found = room.indices[: words.size], room.found[: words.size]
        np.copyto(indices, words, casting="unsafe")
        np.take(self._lookup, indices, out=found, mode="clip")  # `clip` lets take write to `out` without a copy
        np.add(state, found.view(np.float32)[: state.size], out=state)


def look_up(table: QuantiserTable, bits: int, each: int) -> Floats:
    """What every word of so many symbols adds, a row for each."""
    # Every symbol that can occur, with those of the other places in the word: the first one varies fastest.
    known = table.values[: 1 << bits]
    found = np.zeros([1 << bits] * each + [each], np.float32)
    for place in range(each):
        filled = found[(slice(0, known.size),) * each]
        filled[..., place] = known.reshape([-1 if axis == each - 1 - place else 1 for axis in range(each)])
    return found.reshape(-1, each)


def _each(bits: int, is_wide: bool) -> int:
    """Symbols that are looked up at once."""
    return {2: 4, 4: 4 if is_wide else 2, 8: 2 if is_wide else 1}[bits]


def is_codable(high: float, low: float) -> bool:
    """Whether differences between these two are finite, and small enough that sums with them are."""
    return high < _LIMIT and low > -_LIMIT  # NaN is neither


def encode(pieces: Sequence[Piece], table: QuantiserTable, bits: int, out: Bytes) -> Outcome:
    """Pack the symbols of a group into `out`, leaf by leaf, and move the state on.

    Where the outcome is not sound the state is of no use and has to be replaced by the values themselves.
    """
    outcome, decoder, found, rooms = Outcome(), Decoder(table, bits), Scratch(bits, CHUNK), Rooms()
    room, codes_room = np.empty(CHUNK, np.float32), np.empty(CHUNK, np.uint8)
    position = 0
    for values, state in chunks(pieces):
        count = values.size
        nbytes = packed_nbytes(count, bits)
        delta = difference(values, state, room)
        high, low = float(delta.max()), float(delta.min())
        if not is_codable(high, low):
            return Outcome(is_sound=False)
        outcome.largest = max(outcome.largest, high, -low)
        codes = codes_room[: nbytes * 8 // bits]
        codes[:] = 0
        table.assign(delta, codes[:count], rooms)
        packed = out[position : position + nbytes]
        pack(codes, bits, packed)
        with np.errstate(over="ignore", invalid="ignore"):
            decoder.add(packed, state, found)
        if not is_finite(state):
            return Outcome(is_sound=False)
        outcome.kept += int(np.count_nonzero(codes))
        position += nbytes
    return outcome


def decode(state: Floats, moves: Sequence[tuple[Decoder, Bytes]], room: Scratch) -> None:
    """Add packed symbols to a stretch of a leaf: of one record after the other, while a part of it is in the cache."""
    with np.errstate(over="ignore", invalid="ignore"):
        position = 0
        for start in range(0, state.size, room.most):
            part = state[start : start + room.most]
            nbytes = packed_nbytes(part.size, room.bits)
            for decoder, packed in moves:
                decoder.add(packed[position : position + nbytes], part, room)
            position += nbytes
