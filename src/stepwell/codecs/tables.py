"""Quantiser tables: which differences get which symbol, and the value a symbol stands for.

Owns:    the rules of `lc`, `ternary` and `uniform`. A reader needs `values` alone; the rest is the writer's.
Before:  `histogram` counted.   After: `quantise` applies the table.
Holds:   symbol 0 adds nothing. Every other value is a bfloat16, or a small multiple of one, so that sums of a few of
         them are exact. Tables come from counts, smallest and largest members only, in float64 and in the order of the
         keys where a mean is needed: every device makes the same.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from stepwell.codecs.floats import MANTISSA_BITS, MOST_EXPONENT, Bytes, Floats, Words, from_bf16, middle, round_to_bf16
from stepwell.codecs.histogram import CHUNK, Histogram
from stepwell.codecs.spec import LC, Spec, Ternary, Uniform

MOST_STEPS: Final = 127
_BIAS: Final = 127


class Rooms:
    """Arrays of one chunk for intermediate results, made once."""

    def __init__(self) -> None:
        self.keys: Words = np.empty(CHUNK, np.uint32)
        self.short_keys: NDArray[np.uint16] = np.empty(CHUNK, np.uint16)
        self.mask: NDArray[np.bool_] = np.empty(CHUNK, np.bool_)
        self.codes: Bytes = np.empty(CHUNK, np.uint8)
        self.floats: Floats = np.empty(CHUNK, np.float32)


class Table(ABC):
    """values: by symbol. `heads`: the numbers that are stored for them, bits of bfloat16. `reach`: differences from
    there on get no symbol that is near them; a table that meets such ones is not used again.
    """

    heads: tuple[int, ...]
    values: Floats
    reach: float = math.inf

    @abstractmethod
    def assign(self, delta: Floats, codes: Bytes, rooms: Rooms) -> None:
        """Fill `codes`, which is zero, with the symbols of finite differences."""


class BucketTable(Table):
    """lc: symbol i + 1 is the i-th bucket by priority."""

    def __init__(self, heads: tuple[int, ...], keys: tuple[int, ...] = ()) -> None:
        self.heads, self.keys = heads, keys
        self.values = from_bf16(np.array([0, *heads], np.uint16))
        if keys:
            self.reach = 2.0 ** ((keys[0] & 255) + 1 - _BIAS)

    def assign(self, delta: Floats, codes: Bytes, rooms: Rooms) -> None:
        count = delta.size
        keys, mask, marked = rooms.short_keys[:count], rooms.mask[:count], rooms.codes[:count]
        np.right_shift(delta.view(np.uint32), np.uint32(MANTISSA_BITS), out=rooms.keys[:count])
        np.copyto(keys, rooms.keys[:count], casting="unsafe")
        for symbol, key in enumerate(self.keys, 1):
            np.equal(keys, np.uint16(key), out=mask)
            np.multiply(mask.view(np.uint8), np.uint8(symbol), out=marked)
            np.bitwise_or(codes, marked, out=codes)


class SignTable(Table):
    """ternary: 1 is plus, 2 is minus the magnitude."""

    def __init__(self, heads: tuple[int, ...], threshold: float = math.inf) -> None:
        self.heads, self.threshold = heads, np.float32(threshold)
        self.values = from_bf16(np.array([0, heads[0], heads[0] | 0x8000], np.uint16))

    def assign(self, delta: Floats, codes: Bytes, rooms: Rooms) -> None:
        mask, marked = rooms.mask[: delta.size], rooms.codes[: delta.size]
        np.greater_equal(delta, self.threshold, out=mask)
        np.bitwise_or(codes, mask.view(np.uint8), out=codes)
        np.less_equal(delta, -self.threshold, out=mask)
        np.multiply(mask.view(np.uint8), np.uint8(2), out=marked)
        np.bitwise_or(codes, marked, out=codes)


class StepTable(Table):
    """uniform: the symbol is the number of steps, in two's complement."""

    def __init__(self, heads: tuple[int, ...]) -> None:
        self.heads = heads
        step = from_bf16(np.array(heads, np.uint16))[0]
        with np.errstate(all="ignore"):  # a forged step; those of ours have multiples and a reciprocal
            self.values = np.arange(256, dtype=np.uint8).view(np.int8).astype(np.float32) * step
            self.per_step: np.float32 = np.float32(1) / step
        self.reach = (MOST_STEPS + 1) * float(step)

    def assign(self, delta: Floats, codes: Bytes, rooms: Rooms) -> None:
        steps = rooms.floats[: delta.size]
        with np.errstate(over="ignore"):  # a step of an older table may be very small: more than can be counted
            np.multiply(delta, self.per_step, out=steps)
        np.rint(steps, out=steps)
        np.clip(steps, -MOST_STEPS, MOST_STEPS, out=steps)
        np.copyto(codes.view(np.int8), steps, casting="unsafe")


def stored_bits(spec: Spec) -> int:
    """Bits of a packed symbol. Three are packed as four: a code that straddles bytes compresses worse."""
    if isinstance(spec, LC):
        return 2 if spec.bits == 2 else 4
    return 2 if isinstance(spec, Ternary) else 8


def wanted_ranges(spec: Spec) -> int:
    """For how many keys the ranges have to be measured."""
    return 2**spec.bits - 1 if isinstance(spec, LC) else 0


def make_table(spec: Spec, found: Histogram) -> Table:
    """The table of a group that has something to code."""
    if isinstance(spec, LC):
        keys = tuple(found.top(2**spec.bits - 1))
        return BucketTable(tuple(representative(found, key) for key in keys), keys)
    # Never above where the largest differences begin: what is left out everywhere and always would never be sent.
    most = 2.0 ** (_magnitudes(found)[-1][0] - _BIAS)
    rms = root_mean_square(found)
    if isinstance(spec, Ternary):
        threshold = from_head(round_to_bf16(min(spec.threshold * rms, most)))
        return SignTable((round_to_bf16(mean_above(found, threshold)),), threshold)
    assert isinstance(spec, Uniform)
    return StepTable((max(round_to_bf16(min(spec.step * rms, most)), _LEAST_STEP),))


def read_table(spec: Spec, heads: tuple[int, ...]) -> Table:
    """The table as readers have it."""
    kinds: dict[type[Spec], Callable[[tuple[int, ...]], Table]]
    kinds = {LC: BucketTable, Ternary: SignTable, Uniform: StepTable}
    return kinds[type(spec)](heads)


def most_heads(spec: Spec) -> int:
    """How many numbers a table may have."""
    return wanted_ranges(spec) or 1


def from_head(head: int) -> float:
    """The value of a stored number."""
    return float(from_bf16(np.array([head], np.uint16))[0])


def representative(found: Histogram, key: int) -> int:
    """The middle of a bucket's smallest and largest member, with their sign."""
    return middle(found.lo[key], found.hi[key]) | (0x8000 if key >= 256 else 0)


def root_mean_square(found: Histogram) -> float:
    """Of all differences, each taken as the middle of its bucket; zeros count."""
    total = 0.0
    for exponent, count in _magnitudes(found):
        total += count * (1.5 * 2.0 ** (exponent - _BIAS)) ** 2
    return math.sqrt(total / int(found.counts.sum()))


def mean_above(found: Histogram, threshold: float) -> float:
    """Mean magnitude from a threshold on, as if each bucket were filled evenly. The threshold if nothing is there."""
    total, number = 0.0, 0.0
    for exponent, count in _magnitudes(found):
        low, high = 2.0 ** (exponent - _BIAS), 2.0 ** (exponent - _BIAS + 1)
        if high <= threshold:
            continue
        start = max(low, threshold)
        share = count * (high - start) / (high - low)
        total, number = total + share * (start + high) / 2, number + share
    return total / number if number else threshold


_LEAST_STEP: Final = 0x0080  # the smallest normal bfloat16: its reciprocal is finite


def _magnitudes(found: Histogram) -> list[tuple[int, int]]:
    both = found.counts[:256] + found.counts[256:]
    return [(exponent, int(both[exponent])) for exponent in range(1, MOST_EXPONENT + 1) if both[exponent]]
