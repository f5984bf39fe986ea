"""Boxes: which part of a whole tensor a leaf of a rank is. Only arithmetic.

Holds:   a box lies inside its tensor; two boxes meet in a box, or not at all.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
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
    near: list[Box] = []
    for part in sorted(parts):
        near = [other for other in near if other.ends[:1] > part.offsets[:1]]  # a thousand ranks: not each with each
        if any(part.meet(other) is not None for other in near):
            return False
        near.append(part)
    return True


class Runs:
    """A box of one tensor that goes to a box of another: the longest runs of elements that lie together in both.

    source, target:  two boxes of the same shape, in tensors of `source_shape` and `target_shape`, stored row by row
    """

    def __init__(self, source: Box, source_shape: Sequence[int], target: Box, target_shape: Sequence[int]) -> None:
        shape = source.shape
        split = len(shape)
        while split and shape[split - 1] == source_shape[split - 1] == target_shape[split - 1]:
            split -= 1
        split = max(0, split - 1)  # the last dimension that is cut still lies together
        self.length = math.prod(shape[split:])
        self.count = math.prod(shape[:split]) if self.length else 0
        self._outer = shape[:split]
        self._places = [_Place(box, whole) for box, whole in ((source, source_shape), (target, target_shape))]

    def starts(self, number: int) -> tuple[int, int]:
        """Where run `number` begins, counted in elements: in the source's tensor, and in the target's."""
        index = []
        for size in reversed(self._outer):
            number, position = divmod(number, size)
            index.append(position)
        index.reverse()
        source, target = (place.start(index) for place in self._places)
        return source, target

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return (self.starts(number) for number in range(self.count))


class _Place:
    def __init__(self, box: Box, shape: Sequence[int]) -> None:
        self._strides = [math.prod(shape[dimension + 1 :]) for dimension in range(len(shape))]
        self._first = sum(offset * stride for offset, stride in zip(box.offsets, self._strides, strict=True))

    def start(self, index: Sequence[int]) -> int:
        return self._first + sum(position * stride for position, stride in zip(index, self._strides, strict=False))
