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
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from stepwell.storage.codecs.codec_spec import LC, Spec, Ternary, Uniform
from stepwell.storage.codecs.floats import MANTISSA_BITS, Bytes, Floats, Words, from_bf16, middle, round_to_bf16
from stepwell.storage.codecs.histogram import CHUNK, Histogram

MOST_STEPS: Final = 127
_BIAS: Final = 127
_LEAST_STEP: Final = np.uint16(0x0080)  # the smallest normal bfloat16: its reciprocal is finite

Counts = NDArray[np.int64]
Doubles = NDArray[np.float64]


class Rooms:
    """Arrays of one chunk for intermediate results, made once."""

    def __init__(self) -> None:
        self.keys: Words = np.empty(CHUNK, np.uint32)
        self.short_keys: NDArray[np.uint16] = np.empty(CHUNK, np.uint16)
        self.mask: NDArray[np.bool_] = np.empty(CHUNK, np.bool_)
        self.codes: Bytes = np.empty(CHUNK, np.uint8)
        self.floats: Floats = np.empty(CHUNK, np.float32)


class QuantiserTable(ABC):
    """values: by symbol. `heads`: the numbers that are stored for them, bits of bfloat16. `reach`: differences from
    there on get no symbol that is near them; a table that meets such ones is not used again.
    """

    heads: tuple[int, ...]
    values: Floats
    reach: float = math.inf

    @abstractmethod
    def assign(self, delta: Floats, codes: Bytes, rooms: Rooms) -> None:
        """Fill `codes`, which is zero, with the symbols of finite differences."""


class BucketTable(QuantiserTable):
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


class SignTable(QuantiserTable):
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


class StepTable(QuantiserTable):
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


@dataclass(frozen=True)
class Tables:
    """Of many groups at once, group by group. keys: of lc, 0 where a group has no more. thresholds: of ternary."""

    spec: Spec
    heads: NDArray[np.uint16]
    keys: NDArray[np.int32] | None = None
    thresholds: Floats | None = None

    def table(self, number: int) -> QuantiserTable:
        heads = tuple(self.heads[number].tolist())
        if self.keys is not None:
            keys = [key for key in self.keys[number].tolist() if key]
            return BucketTable(heads[: len(keys)], tuple(keys))
        return StepTable(heads) if self.thresholds is None else SignTable(heads, float(self.thresholds[number]))


def make_table(spec: Spec, found: Histogram) -> QuantiserTable:
    """The table of a group that has something to code."""
    if isinstance(spec, LC):
        keys = found.top(2**spec.bits - 1)
        lo, hi = (np.array([[ends[key] for key in keys]], np.uint32) for ends in (found.lo, found.hi))
        return bucket_tables(spec, np.array([keys], np.int32), lo, hi).table(0)
    both = found.counts[:256] + found.counts[256:]
    exponents = np.flatnonzero(both[1:]) + 1
    return step_tables(spec, exponents, both[exponents, None], found.counts.sum(keepdims=True)).table(0)


def bucket_tables(spec: Spec, keys: NDArray[np.int32], lo: Words, hi: Words) -> Tables:
    """lc: for each bucket the middle of its smallest and largest member, with their sign."""
    return Tables(spec, middle(lo, hi) | np.where(keys >= 256, np.uint16(0x8000), np.uint16(0)), keys)


def step_tables(spec: Spec, exponents: Counts, counts: Counts, entries: Counts) -> Tables:
    """ternary and uniform, of groups that have something to code. counts: by exponent, from small to large, and group;
    of no other exponents, but that of zero. entries: zeros too.

    Differences are taken as the middle of their bucket for the root of their mean square.
    """
    low = np.ldexp(1.0, exponents - _BIAS)[:, None]
    # Never above where the largest differences begin: what is left out everywhere and always would never be sent.
    most = np.where(counts, low, 0.0).max(0)
    # Float sums, but in the order of the exponents: the same everywhere.
    rms = np.sqrt(_total(counts * (1.5 * low) ** 2) / entries)
    if isinstance(spec, Ternary):
        thresholds = from_bf16(round_to_bf16(np.minimum(spec.threshold * rms, most)))
        heads = round_to_bf16(_mean_above(counts, low, thresholds.astype(np.float64)))
        return Tables(spec, heads[:, None], thresholds=thresholds)
    assert isinstance(spec, Uniform)
    return Tables(spec, np.maximum(round_to_bf16(np.minimum(spec.step * rms, most)), _LEAST_STEP)[:, None])


def read_table(spec: Spec, heads: tuple[int, ...]) -> QuantiserTable:
    """The table as readers have it."""
    kinds: dict[type[Spec], Callable[[tuple[int, ...]], QuantiserTable]]
    kinds = {LC: BucketTable, Ternary: SignTable, Uniform: StepTable}
    return kinds[type(spec)](heads)


def most_heads(spec: Spec) -> int:
    """How many numbers a table may have."""
    return wanted_ranges(spec) or 1


def _mean_above(counts: Counts, low: Doubles, thresholds: Doubles) -> Doubles:
    """Mean magnitude from a threshold on, as if each bucket were filled evenly. The threshold if nothing is there."""
    high = 2 * low
    start = np.maximum(low, thresholds)
    share = np.where(high <= thresholds, 0.0, counts * (high - start) / (high - low))
    number = _total(share)
    found: Doubles = np.divide(_total(share * (start + high) / 2), number, out=thresholds.copy(), where=number != 0)
    return found


def _total(terms: Doubles) -> Doubles:
    """Of each column, from the first row to the last."""
    found: Doubles = np.add.accumulate(terms, 0)[-1]
    return found
