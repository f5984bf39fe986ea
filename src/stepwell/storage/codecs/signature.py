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

from stepwell.storage.chain.apply_threads import Crew
from stepwell.storage.codecs.floats import Bytes, Words

COLUMNS: Final = 1 << 14
FACTOR: Final = 0x9E3779B5
MIX_BITS: Final = 16
_ROWS: Final = 16
"""Rows that are mixed at once: all that is made of them stays in the cache, and calls are few."""
_SLAB: Final = 256 * COLUMNS
"""Words that one thread sums up at a time."""
_POWERS: Final[Words] = np.array([pow(FACTOR, _ROWS - 1 - row, 1 << 32) for row in range(_ROWS)], np.uint32)


def signature(*pieces: Bytes, threads: int = 1) -> Words:
    """Of the bytes of a part, which may come in pieces."""
    sums = np.zeros(COLUMNS, np.uint32)
    row, filled = np.zeros(4 * COLUMNS, np.uint8), 0
    with Crew(threads) as crew:
        for data in pieces:
            if filled:
                head, data = data[: row.size - filled], data[row.size - filled :]
                row[filled : filled + head.size] = head
                filled += head.size
                if filled < row.size:
                    continue
                sums = _join(sums, 1, _sum(row.view(np.uint32)))
            whole = data.size - data.size % row.size
            words: Words = data[:whole].view(np.uint32)
            slabs = [words[start : start + _SLAB] for start in range(0, words.size, _SLAB)]
            for slab, found in zip(slabs, crew.each(_sum, slabs), strict=True):
                sums = _join(sums, slab.size // COLUMNS, found)
            filled = data.size - whole
            row[:filled] = data[whole:]
    if filled:
        row[filled:] = 0
        sums = _join(sums, 1, _sum(row.view(np.uint32)))
    return sums


def _sum(words: Words) -> Words:
    """Of some rows alone, `_ROWS` of them at a time, by Horner's rule."""
    sums, room = np.zeros(COLUMNS, np.uint32), np.empty(min(words.size, _ROWS * COLUMNS), np.uint32)
    found = np.empty(COLUMNS, np.uint32)
    for start in range(0, words.size, _ROWS * COLUMNS):
        part = words[start : start + _ROWS * COLUMNS]
        mixed = room[: part.size]
        np.right_shift(part, np.uint32(MIX_BITS), out=mixed)
        np.bitwise_xor(mixed, part, out=mixed)
        rows = mixed.reshape(-1, COLUMNS)
        np.multiply(rows, _POWERS[_ROWS - len(rows) :, None], out=rows)
        sums = _join(sums, len(rows), np.add.reduce(rows, axis=0, out=found))
    return sums


def _join(sums: Words, rows: int, more: Words) -> Words:
    """Sums with those of so many rows after them."""
    np.multiply(sums, np.uint32(pow(FACTOR, rows, 1 << 32)), out=sums)
    return np.add(sums, more, out=sums)


def part_digest(nbytes: int, found: Words) -> bytes:
    """xxh3-128 of a part's length and signature."""
    whole = xxhash.xxh3_128(nbytes.to_bytes(8, "little"))
    whole.update(found.data)
    return whole.digest()


def state_digest(parts: Iterable[bytes]) -> bytes:
    """xxh3-128 of the digests of all parts."""
    return xxhash.xxh3_128_digest(b"".join(parts))
