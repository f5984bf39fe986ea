"""What the differences of a group are like: how many have each key, and the range of the largest ones.

Owns:    the first of the two passes over a group.   After: `tables` decides what gets a symbol.
Holds:   counts, smallest and largest member are whole numbers and do not depend on the order they are taken in: every
         device finds the same. Nothing is ever derived from a sum of floats.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from stepwell.storage.codecs.floats import KEYS, MANTISSA_BITS, MOST_EXPONENT, Floats, Words, middle

CHUNK: Final = 1 << 17
"""Entries that are worked on at once: all that is made of them stays in the cache. A multiple of 8."""
Piece = tuple[Floats, Floats]
"""A leaf's values, and the reader's state of it."""


@dataclass
class Histogram:
    """Of one group. `lo` and `hi`: bits of the smallest and largest magnitude with a key, known for the top keys."""

    counts: NDArray[np.int64] = field(default_factory=lambda: np.zeros(KEYS, np.int64))
    lo: dict[int, int] = field(default_factory=dict)
    hi: dict[int, int] = field(default_factory=dict)
    settled: set[int] = field(default_factory=set)

    @property
    def is_codable(self) -> bool:
        """Whether all differences are finite, and small enough that sums with them are."""
        signless = self.counts.reshape(2, -1)
        return not signless[:, MOST_EXPONENT + 1 :].any()

    @property
    def is_empty(self) -> bool:
        """Whether no difference is normal: zeros and subnormal numbers, which count as zero, are all there is."""
        return not self.counts.reshape(2, -1)[:, 1:].any()

    def top(self, most: int, *, with_ties: bool = False, least: int = 1) -> list[int]:
        """Keys by priority: exponent down, then count down, then plus first. At most `most`; with ties, all keys of the
        last exponent too. `least`: no exponent below it is among them.
        """
        both = self.counts.reshape(2, -1)[:, least : MOST_EXPONENT + 1]
        occupied = [256 * sign + least + place for sign, place in np.argwhere(both).tolist()]
        occupied.sort(key=lambda key: (-(key & 255), -int(self.counts[key]), key))
        kept = occupied[:most]
        if with_ties and kept:
            kept += [key for key in occupied[most:] if key & 255 == kept[-1] & 255]
        return kept


def chunks(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """The pieces of a group, cut up."""
    for values, state in pieces:
        for start in range(0, values.size, CHUNK):
            stop = min(start + CHUNK, values.size)
            yield values[start:stop], state[start:stop]


def difference(values: Floats, state: Floats, room: Floats) -> Floats:
    """What a chunk's values are beyond the state. Overflow and NaN are for the caller to see, without a warning."""
    with np.errstate(over="ignore", invalid="ignore"):
        return np.subtract(values, state, out=room[: values.size])


def measure(pieces: Iterable[Piece], top: int) -> Histogram:
    """Count the keys of all differences; or, with `top`, only of the most significant ones, and find their ranges.

    Stops at once where something cannot be coded.
    """
    found, dense = Histogram(), range(0)
    room = np.empty(CHUNK, np.float32)
    words, mask, keys = np.empty(CHUNK, np.uint32), np.empty(CHUNK, np.bool_), np.empty(CHUNK, np.uint16)
    for values, state in chunks(pieces):
        count = values.size
        bits = difference(values, state, room).view(np.uint32)
        if dense:
            np.right_shift(bits, np.uint32(MANTISSA_BITS), out=words[:count])
            np.copyto(keys[:count], words[:count], casting="unsafe")
            for key in (key for exponent in dense for key in (exponent, exponent + 256)):
                found.counts[key] += np.count_nonzero(np.equal(keys[:count], np.uint16(key), out=mask[:count]))
        if dense.stop:
            # A key that is among the top ones in the end is among those of what was seen so far: look at no other.
            magnitudes = np.bitwise_and(bits, np.uint32(0x7FFFFFFF), out=words[:count])
            np.greater_equal(magnitudes, np.uint32(dense.stop << MANTISSA_BITS), out=mask[:count])
            bits = bits[np.flatnonzero(mask[:count])]
        here = _count(bits, words)
        found.counts += here
        if not found.is_codable:
            return found
        if top and (wanted := found.top(top, with_ties=True, least=max(dense.start, 1))):
            _extend(found, bits, {key for key in wanted if here[key]}, words[: bits.size])
            if len(wanted) >= top:  # with fewer, any key that is yet to come is among them
                dense = _dense(found, wanted[-1] & 255)
    return found


def _count(bits: Words, room: Words) -> NDArray[np.int64]:
    keys = np.right_shift(bits, np.uint32(MANTISSA_BITS), out=room[: bits.size])
    return np.bincount(keys.astype(np.intp), minlength=KEYS)


def _dense(found: Histogram, cut: int) -> range:
    """Exponents from `cut` on of which nothing can change any more but the counts: both signs are there, and members
    yet to come, which lie in the same bucket, leave the bfloat16 in the middle as it is.
    """
    stop = cut
    while _is_settled(found, stop) and _is_settled(found, stop + 256):
        stop += 1
    return range(cut, stop)


def _is_settled(found: Histogram, key: int) -> bool:
    if key not in found.settled and key in found.lo:
        edge = (key & 255) << MANTISSA_BITS
        lows, highs = (edge, found.lo[key]), (found.hi[key], edge + (1 << MANTISSA_BITS) - 1)
        least, most = middle(np.array(lows, np.uint32), np.array(highs, np.uint32))
        if least == most:
            found.settled.add(key)
    return key in found.settled


def _extend(found: Histogram, bits: Words, wanted: set[int], room: Words) -> None:
    """Widen the ranges of keys that occur among these bits.

    Of bits minus an edge, modulo 2^32, the minimum is the smallest value from the edge on and the maximum is the
    largest one below it: one subtraction serves the key above the edge and the one below.
    """
    for edge_key in sorted(wanted | {key + 1 for key in wanted}):
        edge = edge_key << MANTISSA_BITS
        np.subtract(bits, np.uint32(edge), out=room)
        if edge_key in wanted:
            smallest = (int(room.min()) + edge) & 0x7FFFFFFF
            found.lo[edge_key] = min(found.lo.get(edge_key, smallest), smallest)
        if edge_key - 1 in wanted:
            largest = (int(room.max()) + edge) & 0x7FFFFFFF
            found.hi[edge_key - 1] = max(found.hi.get(edge_key - 1, largest), largest)
