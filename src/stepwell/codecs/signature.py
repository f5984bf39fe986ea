"""The digest of a state: sums over its words, which another device can take in any order.

Owns:    the signature of an array, and the digests made of signatures.
Before:  `image` has the arrays, or a device has.   After: heads of records say the digest before and after them.
Holds:   every bit of the state counts. It is against drift and mistakes, not against forgery: sums are linear, and who
         wants two states with one digest finds them. Bytes at rest have checksums of their own.

The bytes of a part, padded with zeros, are rows of COLUMNS words w of 32 bits. Of column c the signature is the sum of
mix(w[r, c]) * FACTOR^(rows - 1 - r) modulo 2^32, with mix(w) = w ^ w >> 16. FACTOR is 5 modulo 8: its powers are odd,
so that no word is lost, and repeat only after 2^30 rows. Without mixing, the sign bits of two rows would cancel out.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import numpy as np
import xxhash

from stepwell.codecs.floats import Bytes, Words

COLUMNS: Final = 1 << 14
FACTOR: Final = 0x9E3779B5
MIX_BITS: Final = 16
DIGEST_NBYTES: Final = 16
_ROWS: Final = 16
"""Rows that are mixed at once, so that there are fewer calls."""


def signature(*pieces: Bytes) -> Words:
    """Of the bytes of a part, which may come in pieces."""
    sums, room = np.zeros(COLUMNS, np.uint32), np.empty(_ROWS * COLUMNS, np.uint32)
    row, filled = np.zeros(4 * COLUMNS, np.uint8), 0
    for data in pieces:
        if filled:
            head, data = data[: row.size - filled], data[row.size - filled :]
            row[filled : filled + head.size] = head
            filled += head.size
            if filled < row.size:
                continue
            _add(row.view(np.uint32), room, sums)
        whole = data.size - data.size % row.size
        words: Words = data[:whole].view(np.uint32)
        for start in range(0, words.size, room.size):
            _add(words[start : start + room.size], room, sums)
        filled = data.size - whole
        row[:filled] = data[whole:]
    if filled:
        row[filled:] = 0
        _add(row.view(np.uint32), room, sums)
    return sums


def _add(words: Words, room: Words, sums: Words) -> None:
    """Some more rows, by Horner's rule."""
    mixed = room[: words.size]
    np.right_shift(words, np.uint32(MIX_BITS), out=mixed)
    np.bitwise_xor(mixed, words, out=mixed)
    for row in mixed.reshape(-1, COLUMNS):
        np.multiply(sums, np.uint32(FACTOR), out=sums)
        np.add(sums, row, out=sums)


def part_digest(nbytes: int, found: Words) -> bytes:
    """xxh3-128 of a part's length and signature."""
    whole = xxhash.xxh3_128(nbytes.to_bytes(8, "little"))
    whole.update(found.data)
    return whole.digest()


def state_digest(parts: Iterable[bytes]) -> bytes:
    """xxh3-128 of the digests of all parts."""
    return xxhash.xxh3_128_digest(b"".join(parts))
