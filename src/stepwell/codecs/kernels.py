"""Triton kernels for one part: what `histogram` and `quantise` do on the host, to the same bits.

Owns:    the arithmetic on the device.   Before: `device` lays out the tables.   After: `device` reads the results.
Holds:   everything that leaves a kernel is a whole number, added or compared without an order, or a sum of two floats.
         Nothing is fused (BUILD), nothing flushed; what has the exponent 0 is zero to a quantiser.

A program works on one tile: up to TILE_ROWS stretches of WIDTH entries of one leaf that are COLUMNS entries apart, so
that a lane stays in one column of the signature and adds it up in a register. One launch does all leaves: `tiles` has
leaf, first entry and rows of each; `slots` has of each leaf its address, place in the part, entries, group, and where
its symbols begin.
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

WIDTH: Final = 1024
TILE_ROWS: Final = 16
TILE_FIELDS: Final = 3
SLOT_FIELDS: Final = 5
MOST_SYMBOLS: Final = 8
STATS: Final = 3
"""Of a group: entries with a symbol, bits of the largest difference, bits of the largest magnitude of the new state."""
BUILD: Final = {"enable_fp_fusion": False}
NOTHING, SYMBOLS, VALUES = range(3)
"""What is done with a group: left alone; coded; replaced by the values."""
LC, TERNARY, UNIFORM = range(3)


@triton.jit
def _tile(tiles, slots, WIDTH: tl.constexpr, ALIGN: tl.constexpr):
    """Address, place, entries, group, first symbol byte; first entry and rows of the tile."""
    tile = tiles + tl.program_id(0).to(tl.int64) * 3
    slot = slots + tl.load(tile) * 5
    source = tl.multiple_of(tl.load(slot).to(tl.pointer_type(tl.float32)), ALIGN)
    start = tl.multiple_of(tl.load(slot + 1), ALIGN)
    count = tl.multiple_of(tl.load(slot + 2), ALIGN)
    packed = tl.multiple_of(tl.load(slot + 4), ALIGN)
    return source, start, count, tl.load(slot + 3), packed, tl.multiple_of(tl.load(tile + 1), WIDTH), tl.load(tile + 2)


@triton.jit
def _magnitude(values):
    return values.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _key(values):
    return (values.to(tl.uint32, bitcast=True) >> 23).to(tl.int32)


@triton.jit
def _mixed(values):
    words = values.to(tl.uint32, bitcast=True)
    return words ^ (words >> 16)


@triton.jit
def _add_column(totals, sums, powers, part_rows, position, rows, inside,
                COLUMNS: tl.constexpr):  # fmt: skip
    """Weigh what a tile's lanes added up, by the rows of the part that are below their last one, and give it away."""
    below = part_rows - position // COLUMNS - rows
    weight = tl.load(powers + below + 1, inside, 0).to(tl.uint32, bitcast=True)  # powers begin with the one of -1
    tl.atomic_add(sums + position % COLUMNS, (totals * weight).to(tl.int32, bitcast=True), inside)


@triton.jit
def count_keys(tiles, slots, wanted, reference, counts,
               COLUMNS: tl.constexpr, WIDTH: tl.constexpr, ALIGN: tl.constexpr) -> None:  # fmt: skip
    """Of the wanted groups: how many differences have each key. Lanes beyond a leaf count as zeros."""
    source, start, count, group, _, first, rows = _tile(tiles, slots, WIDTH, ALIGN)
    if tl.load(wanted + group) != 0:
        lane, keys = tl.arange(0, WIDTH), tl.arange(0, 512)
        found = tl.zeros([512], tl.int32)
        for row in range(rows):
            at = first + row * COLUMNS + lane
            inside = at < count
            delta = tl.load(source + at, inside, 0.0) - tl.load(reference + start + at, inside, 0.0)
            found += tl.histogram(_key(delta), 512)
        tl.atomic_add(counts + group * 512 + keys, found.to(tl.int64), found > 0)


@triton.jit
def find_ranges(tiles, slots, wanted, reference, keys, low, high,
                COLUMNS: tl.constexpr, WIDTH: tl.constexpr, ALIGN: tl.constexpr) -> None:  # fmt: skip
    """Of the wanted groups: bits of the smallest and largest magnitude with each of up to 8 keys."""
    source, start, count, group, _, first, rows = _tile(tiles, slots, WIDTH, ALIGN)
    if tl.load(wanted + group) != 0:
        lane, symbol = tl.arange(0, WIDTH), tl.arange(0, 8)
        own = tl.load(keys + group * 8 + symbol)
        least = tl.full([8], 0x7FFFFFFF, tl.int32)
        most = tl.full([8], 0, tl.int32)
        for row in range(rows):
            at = first + row * COLUMNS + lane
            inside = at < count
            delta = tl.load(source + at, inside, 0.0) - tl.load(reference + start + at, inside, 0.0)
            is_own = _key(delta)[None, :] == own[:, None]
            bits = _magnitude(delta)[None, :]
            least = tl.minimum(least, tl.min(tl.where(is_own, bits, 0x7FFFFFFF), 1))
            most = tl.maximum(most, tl.max(tl.where(is_own, bits, 0), 1))
        tl.atomic_min(low + group * 8 + symbol, least, most > 0)
        tl.atomic_max(high + group * 8 + symbol, most, most > 0)


@triton.jit
def _symbols(delta, own, scale, KIND: tl.constexpr):
    """As `Table.assign`. own: the keys of lc. scale: the threshold of ternary, steps in one of uniform."""
    if KIND == 0:
        key = _key(delta)
        found = tl.zeros_like(key)
        for i in tl.static_range(7):
            found = tl.where(key == own[i], i + 1, found)
    elif KIND == 1:
        found = (delta >= scale).to(tl.int32) | ((delta <= -scale).to(tl.int32) * 2)
    else:
        # Clipped first: between product and sum, and so that adding 1.5 * 2^23 rounds to whole numbers, ties to even.
        steps = tl.minimum(tl.maximum(delta * scale, -127.0), 127.0)
        found = ((steps + 12582912.0) - 12582912.0).to(tl.int32) & 255
    return found


@triton.jit
def _pack(symbols, BITS: tl.constexpr, WIDTH: tl.constexpr):
    if BITS == 8:
        found = symbols
    else:
        shifts = tl.arange(0, 8 // BITS) * BITS
        found = tl.sum(tl.reshape(symbols, [WIDTH * BITS // 8, 8 // BITS]) << shifts[None, :], 1)
    return found.to(tl.uint8)


@triton.jit
def encode(tiles, slots, modes, reference, packed, values, keys, scales,
           stats, powers, sums, part_rows, KIND: tl.constexpr, BITS: tl.constexpr,
           FACTOR: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, ALIGN: tl.constexpr) -> None:  # fmt: skip
    """Symbols of all groups that are coded, the reference moved on, what came of it, and the new signature."""
    source, start, count, group, begin, first, rows = _tile(tiles, slots, WIDTH, ALIGN)
    mode, scale, per = tl.load(modes + group), tl.load(scales + group), 8 // BITS
    keys += group * 8
    own = (tl.load(keys), tl.load(keys + 1), tl.load(keys + 2), tl.load(keys + 3), tl.load(keys + 4),
           tl.load(keys + 5), tl.load(keys + 6))  # fmt: skip
    lane, byte = tl.arange(0, WIDTH), tl.arange(0, WIDTH * BITS // 8)
    totals = tl.zeros([WIDTH], tl.uint32)
    kept = tl.zeros([WIDTH], tl.int32)
    largest = tl.zeros([WIDTH], tl.int32)
    worst = tl.zeros([WIDTH], tl.int32)
    for row in range(rows):
        at = first + row * COLUMNS + lane
        inside = at < count
        old = tl.load(reference + start + at, inside, 0.0)
        value = tl.load(source + at, inside & (mode != 0), 0.0)
        delta = value - old
        symbols = tl.where(inside & (mode == 1), _symbols(delta, own, scale, KIND), 0)
        moved = old + tl.load(values + group * (1 << BITS) + symbols)
        new = tl.where(mode == 1, moved, tl.where(mode == 2, value, old))
        tl.store(reference + start + at, new, inside & (mode != 0))
        place = (first + row * COLUMNS) // per + byte
        tl.store(packed + begin + place, _pack(symbols, BITS, WIDTH), (place * per < count) & (mode == 1))
        kept += (symbols != 0).to(tl.int32)
        largest = tl.maximum(largest, _magnitude(delta))
        worst = tl.maximum(worst, _magnitude(new))
        totals = totals * FACTOR + tl.where(inside, _mixed(new), 0).to(tl.uint32)
    _add_column(totals, sums, powers, part_rows, start + first + lane, rows, first + lane < count, COLUMNS)
    if mode == 1:
        tl.atomic_add(stats + group * 3, tl.sum(kept, 0).to(tl.int64))
        tl.atomic_max(stats + group * 3 + 1, tl.max(largest, 0).to(tl.int64))
        tl.atomic_max(stats + group * 3 + 2, tl.max(worst, 0).to(tl.int64))


@triton.jit
def settle(tiles, slots, modes, reference, stats, powers, sums, part_rows,
           MOST: tl.constexpr, FACTOR: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
           ALIGN: tl.constexpr) -> None:  # fmt: skip
    """Groups that turned out not to be codable: the reference becomes the values, and the signature follows."""
    source, start, count, group, _, first, rows = _tile(tiles, slots, WIDTH, ALIGN)
    is_bad = (tl.load(stats + group * 3 + 1) >= MOST) | (tl.load(stats + group * 3 + 2) >= 0x7F800000)
    if (tl.load(modes + group) == 1) & is_bad:
        lane = tl.arange(0, WIDTH)
        totals = tl.zeros([WIDTH], tl.uint32)
        for row in range(rows):
            at = first + row * COLUMNS + lane
            inside = at < count
            old = tl.load(reference + start + at, inside, 0.0)
            value = tl.load(source + at, inside, 0.0)
            tl.store(reference + start + at, value, inside)
            totals = totals * FACTOR + (_mixed(value) - _mixed(old))
        _add_column(totals, sums, powers, part_rows, start + first + lane, rows, first + lane < count, COLUMNS)


@triton.jit
def gather(slots, owners, places, found, count, WIDTH: tl.constexpr) -> None:
    """Some entries: of leaf `owners[i]` the one at `places[i]`."""
    at = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    inside = at < count
    source = tl.load(slots + tl.load(owners + at, inside, 0) * 5, inside, 0).to(tl.pointer_type(tl.float32))
    tl.store(found + at, tl.load(source + tl.load(places + at, inside, 0), inside, 0.0), inside)
