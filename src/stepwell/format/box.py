"""Boxes: which part of a whole tensor a leaf of a rank is. Only arithmetic.

Holds:   a box lies inside its tensor; two boxes meet in a box, or not at all.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple


class Box(NamedTuple):
    """The part of a tensor that begins at `offsets` and has this `shape`."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """All of a tensor."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        """Elements in it."""
        return math.prod(self.shape)

    def meet(self, other: Box) -> Box | None:
        """What two boxes have in common; None if that is nothing."""
        low = tuple(map(max, self.offsets, other.offsets))
        high = tuple(map(min, self.ends, other.ends))
        if any(start >= end for start, end in zip(low, high, strict=True)):
            return None
        return Box(low, tuple(end - start for start, end in zip(low, high, strict=True)))

    @property
    def ends(self) -> tuple[int, ...]:
        """One past the last element in each dimension."""
        return tuple(offset + size for offset, size in zip(self.offsets, self.shape, strict=True))

    def inside(self, other: Box) -> Box:
        """The same part, as counted from the start of `other`, which contains it."""
        return Box(tuple(mine - its for mine, its in zip(self.offsets, other.offsets, strict=True)), self.shape)

    def rows(self, first: int, last: int) -> Box:
        """Of this box the rows [first, last) along dimension 0. A tensor without dimensions is one row."""
        if not self.shape:
            return self
        return Box((self.offsets[0] + first, *self.offsets[1:]), (last - first, *self.shape[1:]))

    @property
    def row_count(self) -> int:
        """Rows along dimension 0."""
        return self.shape[0] if self.shape else 1


def is_covered(whole: Box, parts: Sequence[Box]) -> bool:
    """Whether parts that lie inside `whole` make it up, each element once."""
    if sum(part.numel for part in parts) != whole.numel:
        return False
    columns: dict[Box, list[Box]] = {}  # parts that differ in their rows alone: there are few such columns
    for part in sorted((part for part in parts if part.numel), key=lambda part: part.offsets[:1]):
        columns.setdefault(Box(part.offsets[1:], part.shape[1:]), []).append(part)
    neighbours = all(a.meet(b) is None for found in columns.values() for a, b in itertools.pairwise(found))
    across = [(a, b) for number, a in enumerate(columns) for b in list(columns)[:number] if a.meet(b) is not None]
    return neighbours and all(a.meet(b) is None for one, other in across for a in columns[one] for b in columns[other])
