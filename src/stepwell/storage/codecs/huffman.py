"""Huffman coding of symbols, one by one, as in the LC-Checkpoint paper.

Owns:    code lengths, canonical codes, the bits, and when an older table is used again.
Holds:   decoding gives the symbols back for any counts, a single kind of symbol included; nothing is read beyond the
         bytes that are there.

Symbols are coded in blocks of 1024, each with its length in bits, so that decoding works on all blocks at once. Codes
have at most 15 bits, because there are at most 16 symbols. It can never take less than one bit for a symbol; `frames`
over packed symbols can.
"""

from __future__ import annotations

import heapq
from typing import Final

import numpy as np
from numpy.typing import NDArray

from stepwell.errors import DamagedError
from stepwell.storage.codecs.floats import Bytes

BLOCK: Final = 1024
SYMBOLS: Final = 16
TABLE_NBYTES: Final = SYMBOLS // 2
_PEEK: Final = 15
Lengths = tuple[int, ...]


def code_lengths(counts: NDArray[np.int64]) -> Lengths:
    """Bits of each symbol's code; 0 for one that does not occur. A single one that does has one bit."""
    heap: list[tuple[int, int, tuple[int, ...]]] = [
        (int(count), symbol, (symbol,)) for symbol, count in enumerate(counts) if count
    ]
    lengths = [0] * SYMBOLS
    if len(heap) == 1:
        lengths[heap[0][1]] = 1
    heapq.heapify(heap)
    while len(heap) > 1:
        few, least, ones = heapq.heappop(heap)
        many, other, others = heapq.heappop(heap)
        for symbol in ones + others:
            lengths[symbol] += 1
        heapq.heappush(heap, (few + many, min(least, other), ones + others))
    return tuple(lengths)


def choose(counts: NDArray[np.int64], before: Lengths | None) -> tuple[Lengths, bool]:
    """The code lengths to use, and whether these are the ones before: where a new table would not pay for itself."""
    fresh = code_lengths(counts)
    if before is None or any(count and not length for count, length in zip(counts, before, strict=True)):
        return fresh, False
    is_reused = _cost(counts, before) <= _cost(counts, fresh) + TABLE_NBYTES * 8
    return (before, True) if is_reused else (fresh, False)


def _cost(counts: NDArray[np.int64], lengths: Lengths) -> int:
    return sum(int(count) * length for count, length in zip(counts, lengths, strict=True))


def canonical(lengths: Lengths) -> list[int]:
    """The codes: shorter ones first, then by symbol, each the one before plus one."""
    codes, code, last = [0] * len(lengths), 0, 0
    for length, symbol in sorted((length, symbol) for symbol, length in enumerate(lengths) if length):
        code <<= length - last
        codes[symbol], code, last = code, code + 1, length
    return codes


def dump_table(lengths: Lengths) -> bytes:
    """Two lengths in a byte."""
    return bytes(low | high << 4 for low, high in zip(lengths[::2], lengths[1::2], strict=True))


def load_table(data: bytes | memoryview) -> Lengths:
    """Lengths that make a code. Raises DamagedError."""
    lengths = tuple(length for byte in bytes(data) for length in (byte & 15, byte >> 4))
    used = [length for length in lengths if length]
    if len(lengths) != SYMBOLS or not used or sum(1 << (_PEEK - length) for length in used) > 1 << _PEEK:
        raise DamagedError("a table of code lengths makes no code")
    return lengths


def encode(symbols: Bytes, lengths: Lengths) -> bytes:
    """Bits of each block as two bytes, then the bits of all blocks, each block from a new byte on."""
    known, codes = np.array(lengths, np.uint8), np.array(canonical(lengths), np.uint16)
    sizes, parts = [], []
    for start in range(0, symbols.size, BLOCK):
        block = symbols[start : start + BLOCK]
        block_lengths = known[block]
        aligned = codes[block] << (_PEEK + 1 - block_lengths).astype(np.uint16)
        bits = np.unpackbits(aligned.astype(">u2").view(np.uint8).reshape(-1, 2), axis=1)
        is_there = np.arange(16, dtype=np.uint8) < block_lengths[:, None]
        parts.append(np.packbits(bits[is_there]).tobytes())
        sizes.append(int(block_lengths.sum()))
    return np.array(sizes, "<u2").tobytes() + b"".join(parts)


def decode(data: bytes | memoryview, count: int, lengths: Lengths) -> Bytes:
    """The symbols. Raises DamagedError where the bits are not those of `count` symbols."""
    blocks = -(-count // BLOCK)
    if len(data) < 2 * blocks:
        raise DamagedError("the bits of symbols end too early", expected=2 * blocks, found=len(data))
    sizes = np.frombuffer(data, "<u2", blocks).astype(np.int64)
    nbytes = (sizes + 7) // 8
    body = np.frombuffer(data, np.uint8, offset=2 * blocks)
    if int(nbytes.sum()) != body.size:
        raise DamagedError(f"symbols take {int(nbytes.sum())} bytes, {body.size} are there", found=body.size)
    padded = np.concatenate([body, np.zeros(4, np.uint8)]).astype(np.uint32)
    symbol_of, length_of = _lookup(lengths)
    starts = (np.cumsum(nbytes) - nbytes) * 8
    position, end = starts.copy(), starts + sizes
    found = np.zeros((BLOCK, blocks), np.uint8)
    for step in range(min(count, BLOCK)):
        # The last block may be shorter: it is the last column.
        active = blocks if step < count - (blocks - 1) * BLOCK else blocks - 1
        at = np.minimum(position[:active], body.size * 8)
        byte, shift = at >> 3, (at & 7).astype(np.uint32)
        window = padded[byte] << np.uint32(16) | padded[byte + 1] << np.uint32(8) | padded[byte + 2]
        peeked = window >> (np.uint32(24 - _PEEK) - shift) & np.uint32((1 << _PEEK) - 1)
        found[step, :active] = symbol_of[peeked]
        position[:active] += length_of[peeked]
    if (position != end).any():
        raise DamagedError("the bits of symbols do not end where they should")
    return np.ascontiguousarray(found.T).reshape(-1)[:count]


def _lookup(lengths: Lengths) -> tuple[Bytes, Bytes]:
    """Symbol and length by the next 15 bits. Bits that are no code have the length 16, which ends nowhere right."""
    symbols, sizes = np.zeros(1 << _PEEK, np.uint8), np.full(1 << _PEEK, 16, np.uint8)
    for symbol, (code, length) in enumerate(zip(canonical(lengths), lengths, strict=True)):
        if length:
            first = code << (_PEEK - length)
            symbols[first : first + (1 << (_PEEK - length))] = symbol
            sizes[first : first + (1 << (_PEEK - length))] = length
    return symbols, sizes
