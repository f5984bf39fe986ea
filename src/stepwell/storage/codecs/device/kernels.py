"""Triton kernels for one part: what `histogram` and `quantise` do on the host, to the same bits.

Owns:    the arithmetic on the device.   Before: `device` lays out the tables.   After: `device` reads the results.
Holds:   everything that leaves a kernel is a whole number, added or compared without an order, or belongs to the error
         of a sample. Nothing is fused (BUILD), nothing flushed; what has the exponent 0 is zero to a quantiser.

A tile is up to TILE_ROWS stretches of WIDTH entries of one leaf that are COLUMNS entries apart, so that a lane stays in
one column of the signature and adds it up in a register. One launch does all leaves: `tiles` has leaf, first entry and
rows of each; `slots` has of each leaf its address, place in the part, entries, group, and where its symbols begin.
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

WIDTH: Final = 1024
TILE_ROWS: Final = 16
COUNT_TOP: Final = {"ROWS": 8, "PIECE": 256, "num_warps": 2, "maxnreg": 128}
COUNT_ALL: Final = {"ROWS": 16, "PIECE": 256, "num_warps": 2}
"""Rows, and entries of each, that the first pass holds in registers: a lane's counts fit in 8 bits, all in 16."""
SPARSE: Final = 1024
"""Programs of a kernel that mostly finds nothing to do."""
PICKS: Final = 8
"""Room for the top keys of a group, at most 7, and for whether it cannot be coded."""
STATS: Final = 3
"""Of a group: entries with a symbol, bits of the largest difference, bits of the largest magnitude of the new state."""
RULE_FIELDS: Final = 16
"""Of a group: what is done with it; threshold of ternary or steps in one of uniform; magnitude or step; then of each
bucket of lc its key, with its value, a bfloat16, in the upper half.
"""
BUCKETS_AT: Final = 4
BUILD: Final = {"enable_fp_fusion": False}
ENCODE_BUILD: Final = {**BUILD, "num_warps": 8}
NOTHING, SYMBOLS, VALUES = range(3)
"""What is done with a group: left alone; coded; replaced by the values."""
LC, TERNARY, UNIFORM = range(3)
BLOCK: Final = 4096
"""Bytes of symbols that a program of `mark` and `gather` looks at."""


@triton.jit
def _tile(tiles, slots, number, WIDTH: tl.constexpr, ALIGN: tl.constexpr):
    """Address and place of a tile's first entry, entries from there to the leaf's end (or a billion, if they are more),
    group, first symbol byte, that first entry, and rows.
    """
    tile = tiles + number * 3
    slot = slots + tl.load(tile) * 5
    first, rows = tl.multiple_of(tl.load(tile + 1), WIDTH), tl.load(tile + 2).to(tl.int32)
    source = tl.multiple_of(tl.load(slot).to(tl.pointer_type(tl.float32)), ALIGN) + first
    start = tl.multiple_of(tl.load(slot + 1), ALIGN) + first
    left = tl.multiple_of(tl.minimum(tl.load(slot + 2) - first, 1 << 30).to(tl.int32), ALIGN)
    packed = tl.multiple_of(tl.load(slot + 4), ALIGN)
    return source, start, left, tl.load(slot + 3), packed, first, rows


@triton.jit
def _magnitude(values):
    return values.to(tl.int32, bitcast=True) & 0x7FFFFFFF


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
    tl.atomic_add(sums + position % COLUMNS, (totals * weight).to(tl.int32, bitcast=True), inside, sem="relaxed")


@triton.jit
def _top(bits, most):
    """The largest exponent among differences whose magnitude has at most these bits."""
    magnitude = (bits & 0x7FFFFFFF).to(tl.int32)
    return tl.max(tl.max(tl.where(magnitude <= most, magnitude, 0), 0), 0) >> 23


@triton.jit
def _open(ranges, base, minus, lane):
    """Two bits for each of the keys of 4 exponents, 8 positive ones first: whether the bfloat16 in the middle of its
    range still depends on where that begins, or ends. Others write there: all threads have to read the same.
    """
    end, exponent, is_minus = lane & 1, base + ((lane >> 1) & 3), (lane >> 3) & 1
    found = tl.load(ranges + 2 * (is_minus * minus + exponent) + end, lane < 16, 0, cache_modifier=".cg")
    edge = exponent << 23
    gap = tl.where(end == 0, 0x7FFFFFFF - edge - found, edge + 0x7FFFFF - found)
    return tl.sum(tl.where((lane < 16) & (gap >= 0x8000), 1 << (lane & 15), 0), 0)


@triton.jit
def _widen(bits, edge, is_minus: tl.constexpr, range_at):
    """Widen the range of a key that occurs."""
    begin = edge.to(tl.uint32) | (is_minus * 0x80000000)
    # Modulo 2^32, whatever has another key is further away from this one's edges.
    below, above = tl.min(bits - begin, 0), tl.min((begin + 0x7FFFFF) - bits, 0)
    gaps, end = tl.min(tl.join(below, above), 0).to(tl.int32), tl.arange(0, 2)
    tl.atomic_max(range_at + end, tl.where(end == 0, 0x7FFFFFFF - edge, edge + 0x7FFFFF) - gaps, sem="relaxed")


@triton.jit
def _count_top(bits, counts, ranges, minus, lane, MOST: tl.constexpr):
    """Keys of the 4 top exponents, then of 4 from the next one that occurs on, until MOST keys were found."""
    top, found = _top(bits, 0x7FFFFFFF), 0
    while top > 0:
        base = tl.maximum(top - 3, 1)
        is_open = _open(ranges, base, minus, lane)
        place = ((bits & 0x7FFFFFFF) >> 23) - base.to(tl.uint32)
        one = tl.where(place < 4, tl.full([], 1, tl.uint32) << ((place & 3) * 8), 0)
        every, plus = tl.sum(one, 0), tl.sum(tl.where(bits < 0x80000000, one, 0), 0)
        # A lane has counted to 8 bits, all lanes count to 16: two of the four numbers to a word.
        words = tl.join(tl.join(every, plus) & 0x00FF00FF, (tl.join(every, plus) >> 8) & 0x00FF00FF)
        words = tl.sum(words, 0).to(tl.int32)
        is_odd, is_plus = tl.arange(0, 2)[None, :], tl.arange(0, 2)[:, None]
        for i in range(4):
            at, edge = base + i, (base + i) << 23
            number = tl.where(is_odd == (i & 1), (words >> ((i >> 1) * 16)) & 0xFFFF, 0)
            n_plus = tl.sum(tl.sum(tl.where(is_plus == 1, number, 0), 0), 0)
            n_minus = tl.sum(tl.sum(tl.where(is_plus == 0, number, 0), 0), 0) - n_plus
            tl.atomic_add(counts + at, n_plus.to(tl.int64), n_plus > 0, sem="relaxed")
            tl.atomic_add(counts + minus + at, n_minus.to(tl.int64), n_minus > 0, sem="relaxed")
            if (n_plus > 0) & (((is_open >> (2 * i)) & 3) != 0):
                _widen(bits, edge, False, ranges + 2 * at)
            if (n_minus > 0) & (((is_open >> (2 * i + 8)) & 3) != 0):
                _widen(bits, edge, True, ranges + 2 * (minus + at))
            found += (n_plus > 0).to(tl.int32) + (n_minus > 0).to(tl.int32)
        if found < MOST:
            top = _top(bits, (base << 23) - 1)
        else:
            top = 0


@triton.jit
def _count_all(bits, counts):
    """Exponents, 31 at a time: signs do not matter to those who want them all."""
    top = _top(bits, 0x7FFFFFFF)
    while top > 0:
        exponents = ((bits & 0x7FFFFFFF) >> 23).to(tl.int32)
        place = tl.where(exponents <= top, tl.minimum(top - exponents, 31), 31)
        number = tl.histogram(tl.ravel(place), 32)
        at = top - tl.arange(0, 32)
        tl.atomic_add(counts + at, number.to(tl.int64), (at > tl.maximum(top - 31, 0)) & (number > 0), sem="relaxed")
        top = _top(bits, (tl.maximum(top - 30, 1) << 23) - 1)


@triton.jit(do_not_specialize=["groups", "copies"])
def count(tiles, slots, wanted, reference, counts, ranges, groups, copies, MOST: tl.constexpr, ROWS: tl.constexpr,
          PIECE: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, ALIGN: tl.constexpr) -> None:  # fmt: skip
    """Of the wanted groups: how many differences have each exponent but 0. Or, with MOST: how many have each of what
    will be the MOST top keys and some others, and the ranges of these, as far as they matter to `middle`.

    A key that is among the top ones of a group is among those of each tile that has it. There are several copies of
    what is counted, so that programs do not wait for each other.
    """
    source, start, left, group, _, _, rows = _tile(tiles, slots, tl.program_id(0), WIDTH, ALIGN)
    if tl.load(wanted + group) != 0:
        left = tl.multiple_of(tl.minimum(left, rows * COLUMNS), ALIGN)
        for number in range(tl.cdiv(rows, ROWS) * (WIDTH // PIECE)):
            row, lane = number // (WIDTH // PIECE) * ROWS, number % (WIDTH // PIECE) * PIECE
            at = (row + tl.arange(0, ROWS)[:, None]) * COLUMNS + lane + tl.arange(0, PIECE)[None, :]
            old = tl.load(reference + start + at, at < left, 0.0)
            bits = (tl.load(source + at, at < left, 0.0) - old).to(tl.uint32, bitcast=True)
            if MOST > 0:
                own = (group.to(tl.int32) + tl.program_id(0) % copies * 2 * groups) * 256
                _count_top(bits, counts + own, ranges + 2 * own, groups * 256, tl.arange(0, PIECE), MOST)
            else:
                _count_all(bits, counts + group * 256)


@triton.jit(do_not_specialize=["groups", "copies"])
def pick(counts, ranges, picks, groups, copies, MOST: tl.constexpr) -> None:
    """As `Histogram.top`: the top keys of each group, their ranges, and whether it has what cannot be coded."""
    group, exponent = tl.program_id(0), tl.arange(0, 256)[:, None]
    end, at = tl.arange(0, 2)[None, :], group * 256 + exponent
    plus, minus = tl.zeros([256, 1], tl.int64), tl.zeros([256, 1], tl.int64)
    plus_range, minus_range = tl.zeros([256, 2], tl.int32), tl.zeros([256, 2], tl.int32)
    for _ in range(copies):
        plus += tl.load(counts + at)
        plus_range = tl.maximum(plus_range, tl.load(ranges + 2 * at + end))
        at += groups * 256
        minus += tl.load(counts + at)
        minus_range = tl.maximum(minus_range, tl.load(ranges + 2 * at + end))
        at += groups * 256
    is_plus, is_minus = (plus > 0).to(tl.int32), (minus > 0).to(tl.int32)
    both = is_plus + is_minus
    above = tl.sum(both, 0)[None, :] - tl.cumsum(both, 0)
    own = picks + group * 24
    for i in tl.static_range(2):
        if i == 0:
            rank, is_top, ends = above + is_minus * (minus > plus).to(tl.int32), is_plus > 0, plus_range
        else:
            rank, is_top, ends = above + is_plus * (plus >= minus).to(tl.int32), is_minus > 0, minus_range
        is_top = is_top & (rank < MOST)
        tl.store(own + rank, exponent + 256 * i, is_top)
        tl.store(own + 8 + 8 * end + rank, tl.where(end == 0, 0x7FFFFFFF - ends, ends), is_top & (end >= 0))
    tl.store(own + 7, tl.sum(tl.sum(tl.where(exponent > 251, both, 0), 0), 0))


@triton.jit
def spread(rules, words) -> None:
    """What lc does, by key: the value, a bfloat16, in the upper half, and the symbol."""
    group, keys = tl.program_id(0), tl.arange(0, 512)
    found = tl.zeros([512], tl.uint32)
    for i in tl.static_range(7):
        bucket = tl.load(rules + group * 16 + 4 + i).to(tl.uint32, bitcast=True)
        found = tl.where((keys == (bucket & 511)) & (keys > 0), (bucket & 0xFFFF0000) | (i + 1), found)
    tl.store(words + group * 512 + keys, found.to(tl.int32, bitcast=True))


@triton.jit
def _assign(delta, inside, words, scale, amount, KIND: tl.constexpr):
    """Symbols, as `Table.assign`, and what they stand for."""
    if KIND == 0:
        word = tl.load(words + (delta.to(tl.uint32, bitcast=True) >> 23)).to(tl.uint32, bitcast=True)
        found, step = (word & 15).to(tl.int32), (word & 0xFFFF0000).to(tl.float32, bitcast=True)
    elif KIND == 1:
        plus, minus = (delta >= scale) & inside, (delta <= -scale) & inside
        found = plus.to(tl.int32) | (minus.to(tl.int32) * 2)
        step = tl.where(plus == minus, 0.0, tl.where(plus, amount, -amount))
    else:
        # Clipped first: between product and sum, and so that adding 1.5 * 2^23 rounds to whole numbers, ties to even.
        steps = tl.minimum(tl.maximum(delta * scale, -127.0), 127.0)
        whole = (steps + 12582912.0) - 12582912.0
        found, step = whole.to(tl.int32) & 255, whole * amount
    return found, step


@triton.jit
def _pack(symbols, BITS: tl.constexpr, WIDTH: tl.constexpr):
    if BITS == 8:
        found = symbols
    else:
        shifts = tl.arange(0, 8 // BITS) * BITS
        found = tl.sum(tl.reshape(symbols, [WIDTH * BITS // 8, 8 // BITS]) << shifts[None, :], 1)
    return found.to(tl.uint8)


@triton.jit
def encode(tiles, slots, rules, words, reference, packed, stats, trouble, powers, sums, part_rows, MOST: tl.constexpr,
           KIND: tl.constexpr, BITS: tl.constexpr, FACTOR: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
           ALIGN: tl.constexpr) -> None:  # fmt: skip
    """Symbols of all groups that are coded, the reference moved on, what came of it, and the new signature."""
    source, start, left, group, begin, first, rows = _tile(tiles, slots, tl.program_id(0), WIDTH, ALIGN)
    rules += group * 16
    mode, scale = tl.load(rules), tl.load(rules + 1).to(tl.float32, bitcast=True)
    amount = tl.load(rules + 2).to(tl.float32, bitcast=True)
    per: tl.constexpr = 8 // BITS
    lane, byte = tl.arange(0, WIDTH), tl.arange(0, WIDTH // per)
    totals = tl.zeros([WIDTH], tl.uint32)
    own, out = reference + start, packed + begin + tl.multiple_of(first // per, WIDTH // per)
    nbytes = tl.multiple_of((left + per - 1) // per, (ALIGN + per - 1) // per)
    if mode == 1:
        kept = tl.zeros([WIDTH], tl.int32)
        largest, worst = tl.zeros([WIDTH], tl.float32), tl.zeros([WIDTH], tl.float32)
        for row in range(rows):
            at = row * COLUMNS + lane
            inside = at < left
            old = tl.load(own + at, inside, 0.0)
            delta = tl.load(source + at, inside, 0.0) - old
            symbols, step = _assign(delta, inside, words + group * 512, scale, amount, KIND)
            new = old + step
            tl.store(own + at, new, inside)
            place = row * (COLUMNS // per) + byte
            tl.store(out + place, _pack(symbols, BITS, WIDTH), place < nbytes)
            kept += (symbols != 0).to(tl.int32)
            largest = tl.maximum(largest, tl.abs(delta), propagate_nan=tl.PropagateNan.ALL)
            worst = tl.maximum(worst, tl.abs(new))  # not a number only where the difference is none either
            totals = totals * FACTOR + _mixed(new)
        most, edge = tl.max(_magnitude(largest), 0), tl.max(_magnitude(worst), 0)
        tl.atomic_add(stats + group * 3, tl.sum(kept, 0).to(tl.int64), sem="relaxed")
        tl.atomic_max(stats + group * 3 + 1, most.to(tl.int64), sem="relaxed")
        tl.atomic_max(stats + group * 3 + 2, edge.to(tl.int64), sem="relaxed")
        tl.atomic_max(trouble, 1, (most >= MOST) | (edge >= 0x7F800000), sem="relaxed")
    else:
        for row in range(rows):
            at = row * COLUMNS + lane
            new = tl.load(own + at, at < left, 0.0)
            if mode == 2:
                new = tl.load(source + at, at < left, 0.0)
                tl.store(own + at, new, at < left)
            totals = totals * FACTOR + _mixed(new)
    _add_column(totals, sums, powers, part_rows, start + lane, rows, lane < left, COLUMNS)


@triton.jit
def settle(tiles, slots, rules, reference, stats, trouble, powers, sums, part_rows, number, MOST: tl.constexpr,
           FACTOR: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, ALIGN: tl.constexpr) -> None:  # fmt: skip
    """Groups that turned out not to be codable: the reference becomes the values, and the signature follows."""
    if tl.load(trouble) != 0:
        for tile in range(tl.program_id(0), number, tl.num_programs(0)):
            source, start, left, group, _, _, rows = _tile(tiles, slots, tile, WIDTH, ALIGN)
            is_bad = (tl.load(stats + group * 3 + 1) >= MOST) | (tl.load(stats + group * 3 + 2) >= 0x7F800000)
            if (tl.load(rules + group * 16) == 1) & is_bad:
                lane = tl.arange(0, WIDTH)
                totals = tl.zeros([WIDTH], tl.uint32)
                for row in range(rows):
                    at = row * COLUMNS + lane
                    old = tl.load(reference + start + at, at < left, 0.0)
                    value = tl.load(source + at, at < left, 0.0)
                    tl.store(reference + start + at, value, at < left)
                    totals = totals * FACTOR + (_mixed(value) - _mixed(old))
                _add_column(totals, sums, powers, part_rows, start + lane, rows, lane < left, COLUMNS)


@triton.jit
def compare(slots, owners, inner, places, base, reference, error, count, WIDTH: tl.constexpr) -> None:
    """Of a sample: sums of squares of what the reference lacks, and of the way from the base, one of each a program."""
    at = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    inside = at < count
    source = tl.load(slots + tl.load(owners + at, inside, 0) * 5, inside, 0).to(tl.pointer_type(tl.float32))
    truth = tl.load(source + tl.load(inner + at, inside, 0), inside, 0.0).to(tl.float64)
    missing = truth - tl.load(reference + tl.load(places + at, inside, 0), inside, 0.0).to(tl.float64)
    way = truth - tl.load(base + at, inside, 0.0).to(tl.float64)
    tl.store(error + tl.program_id(0) * 2, tl.sum(missing * missing, 0))
    tl.store(error + tl.program_id(0) * 2 + 1, tl.sum(way * way, 0))


@triton.jit(do_not_specialize=["nbytes"])
def mark(packed, marks, numbers, nbytes, BLOCK: tl.constexpr) -> None:
    """Which bytes are not zero, a bit each, and how many there are in each block."""
    block, line = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK // 8)
    at = block * BLOCK + line[:, None] * 8 + tl.arange(0, 8)[None, :]
    found = (tl.load(packed + at, at < nbytes, 0) != 0).to(tl.int32)
    place = block * (BLOCK // 8) + line
    tl.store(marks + place, tl.sum(found << tl.arange(0, 8)[None, :], 1).to(tl.uint8), place * 8 < nbytes)
    tl.store(numbers + block, tl.sum(tl.sum(found, 1), 0))


@triton.jit(do_not_specialize=["nbytes", "most"])
def gather(packed, numbers, ends, values, nbytes, most, BLOCK: tl.constexpr) -> None:
    """The bytes that are not zero, in order, as far as there is room for so many. ends: sums of the numbers up to each
    block, with it.
    """
    block = tl.program_id(0).to(tl.int64)
    at = block * BLOCK + tl.arange(0, BLOCK)
    data = tl.load(packed + at, at < nbytes, 0)
    found = (data != 0).to(tl.int32)
    place = tl.load(ends + block) - tl.load(numbers + block) + tl.cumsum(found, 0) - found
    tl.store(values + place, data, (found > 0) & (place < most))
