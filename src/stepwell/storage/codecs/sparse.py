"""Bytes of which few are not zero: a mark for each, one bit, and those that are not zero.

Owns:    when packed symbols are worth it, and the host's way to do it; `thinning` does it on a device.
Holds:   whether it is done depends on counts alone, so that host and device make the same record.

Most symbols are 0, and an entropy code of bytes cannot get below one bit for each. Marks and values apart come close to
what is in them, and the compressor has a fifth of the bytes to look at.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from stepwell.errors import DamagedError
from stepwell.storage.codecs.floats import Bytes

LEAST_NBYTES: Final = 4096
"""Up to here the few bytes of two frames instead of one matter, and dictionaries help."""
_PIECE: Final = 1 << 15
Numbers = NDArray[np.intp]


@dataclass(frozen=True)
class Sparse:
    """nbytes: of all; marks: from the low bits on; values: those that are not zero."""

    nbytes: int
    marks: Bytes
    values: Bytes


def is_sparse(count: int, nbytes: int) -> bool:
    """Of so many bytes, `count` are not zero."""
    return nbytes > LEAST_NBYTES and 2 * count <= nbytes


def marks_nbytes(nbytes: int) -> int:
    """Of the marks of so many bytes."""
    return -(-nbytes // 8)


def thin(data: Bytes) -> Sparse | None:
    """None: it is not worth it."""
    if data.size <= LEAST_NBYTES:
        return None
    found = data != 0
    count = int(np.count_nonzero(found))
    if not is_sparse(count, data.size):
        return None
    marks, values = np.packbits(found, bitorder="little"), np.empty(count, np.uint8)
    for piece, places, own in _pieces(data, marks):
        values[own] = piece[places]
    return Sparse(data.size, marks, values)


class ByteSource(Protocol):
    """Bytes from front to end. left: how many there are yet. Raises DamagedError."""

    @property
    def left(self) -> int: ...

    def fill(self, room: memoryview) -> None: ...


class Filler:
    """The bytes again, from front to end."""

    def __init__(self, nbytes: int, marks: ByteSource, values: ByteSource) -> None:
        self._left, self._marks, self._values = nbytes, marks, values
        self._begun, self._used = np.empty(0, np.uint8), 0
        """The byte of marks of which so many bits are used."""

    def fill(self, room: memoryview) -> None:
        """The next ones. Raises DamagedError."""
        line = np.frombuffer(room, np.uint8)
        line[:] = 0
        for start in range(0, line.size, 8 * _PIECE):
            self._fill(line[start : start + 8 * _PIECE])
        self._left -= line.size
        if not self._left and (self._values.left or self._begun.any()):
            raise DamagedError("marks go beyond the symbols, or there are more values than marks")

    def whole(self) -> Sparse:
        """All of it, as it is, instead of `fill`: that there are as many values as marks is for the caller to see.
        Raises DamagedError.
        """
        found = Sparse(self._left, np.empty(self._marks.left, np.uint8), np.empty(self._values.left, np.uint8))
        self._marks.fill(found.marks.data)
        self._values.fill(found.values.data)
        if found.nbytes % 8 and found.marks[-1] >> found.nbytes % 8:
            raise DamagedError("marks go beyond the symbols")
        return found

    def _fill(self, line: Bytes) -> None:
        ends = self._used + line.size
        marks = np.empty(marks_nbytes(ends), np.uint8)
        before = self._begun.size
        marks[:before] = self._begun
        self._marks.fill(marks[before:].data)
        self._begun, self._used = marks[ends // 8 :].copy(), ends % 8
        if self._used:
            marks[-1] &= (1 << self._used) - 1
            self._begun &= 0xFF << self._used & 0xFF
        places = _places(marks) - (ends - line.size)
        values = np.empty(places.size, np.uint8)
        if places.size > self._values.left:
            raise DamagedError(f"{places.size - self._values.left} values are missing")
        self._values.fill(values.data)
        line[places] = values


def _pieces(data: Bytes, marks: Bytes) -> Iterator[tuple[Bytes, Numbers, slice]]:
    """Data, as much at once as a cache holds with its places; where it has a mark; and which of all marks these are."""
    before = 0
    for start in range(0, marks.size, _PIECE):
        places = _places(marks[start : start + _PIECE])
        yield data[8 * start : 8 * (start + _PIECE)], places, slice(before, before + places.size)
        before += places.size


def _places(marks: Bytes) -> Numbers:
    """Numbers of the bits that are set. NumPy goes from one to the next where they are less than a tenth; then marks
    without any are left out first, so that they are more.
    """
    some = np.flatnonzero(marks != 0)
    if 2 * some.size > marks.size:
        return np.flatnonzero(_bits(marks))
    found = np.flatnonzero(_bits(marks[some]))
    return (some.take(found >> 3) << 3) | (found & 7)


def _bits(marks: Bytes) -> NDArray[np.bool_]:
    return np.unpackbits(marks, bitorder="little").view(np.bool_)
