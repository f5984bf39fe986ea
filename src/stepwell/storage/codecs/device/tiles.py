"""How one part is cut up for kernels: tables of leaves and tiles, and the weights of the signature's rows.

Owns:    the layout that `kernels` describes; addresses are filled in by `device`.
Holds:   every entry is in exactly one tile; symbols lie as on the host, group by group and leaf by leaf, without gaps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stepwell.storage.codecs.assignment import CodedPart, CodedSlot
from stepwell.storage.codecs.coding_groups import group_nbytes
from stepwell.storage.codecs.floats import Words
from stepwell.storage.codecs.quantise import packed_nbytes
from stepwell.storage.codecs.signature import COLUMNS, FACTOR

ALIGNMENT = 16
"""Where addresses, in bytes, and places and sizes of all leaves, in entries, are multiples of it, loads are wider."""


@dataclass(frozen=True)
class Tiles:
    """groups: slots of each, and the bytes of its symbols. rows: of the part, in the signature."""

    table: NDArray[np.int64]
    leaves: NDArray[np.int64]
    groups: tuple[tuple[list[CodedSlot], slice], ...]
    powers: Words
    rows: int

    def with_addresses(self, addresses: Sequence[int]) -> tuple[NDArray[np.int64], int]:
        """The table of leaves, and what all of its numbers are multiples of."""
        leaves = self.leaves.copy()
        leaves[:, 0] = addresses
        is_aligned = not (leaves[:, [0, 1, 2, 4]] % ALIGNMENT).any()
        return leaves, ALIGNMENT if is_aligned else 1


def lay_out(part: CodedPart, bits: int, width: int, most_rows: int) -> Tiles:
    """Tables for symbols of so many bits; tiles of `width` entries in up to `most_rows` rows."""
    numbers = {slot.leaf.name: number for number, slot in enumerate(part.slots)}
    leaves, groups, position = np.zeros((len(part.slots), 5), np.int64), [], 0
    for number, slots in enumerate(part.groups()):
        begin = position
        for slot in slots:
            leaves[numbers[slot.leaf.name]] = (0, slot.start, slot.leaf.count, number, position)
            position += packed_nbytes(slot.leaf.count, bits)
        groups.append((slots, slice(begin, begin + group_nbytes(slots, bits))))
    tiles = [_tiles(number, slot.leaf.count, width, most_rows) for number, slot in enumerate(part.slots)]
    table = np.concatenate([np.empty((0, 3), np.int64), *tiles])
    rows = -(-part.size // COLUMNS)
    return Tiles(table, leaves, tuple(groups), _powers(rows), rows)


def _tiles(number: int, count: int, width: int, most_rows: int) -> NDArray[np.int64]:
    """Of one leaf: its number, first entry and rows of each tile."""
    columns = np.arange(0, min(count, COLUMNS), width, dtype=np.int64)
    starts = np.arange(0, count, COLUMNS * most_rows, dtype=np.int64)
    first = (starts[:, None] + columns).reshape(-1)
    first = first[first < count]
    rows = np.minimum(-(-(count - first) // COLUMNS), most_rows)
    return np.stack([np.full_like(first, number), first, rows], axis=1)


def _powers(rows: int) -> Words:
    """FACTOR to the power of -1, 0, 1 and so on, modulo 2^32."""
    line = np.full(rows + 1, FACTOR, np.uint32)
    line[0] = pow(FACTOR, -1, 1 << 32)
    powers: Words = np.multiply.accumulate(line, dtype=np.uint32)
    return powers
