"""Bytes of which few are not zero: a mark for each, one bit, and those that are not zero.

Owns:    when packed symbols are worth it, and the host's way to do it; `thinning` does it on a device.
Holds:   whether it is done depends on counts alone, so that host and device make the same record.

Most symbols are 0, and an entropy code of bytes cannot get below one bit for each. Marks and values apart come close to
what is in them, and the compressor has a fifth of the bytes to look at.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np

from stepwell.codecs.floats import Bytes
from stepwell.errors import DamagedError

LEAST_NBYTES: Final = 4096
"""Up to here the few bytes of two frames instead of one matter, and dictionaries help."""


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
    if not is_sparse(int(np.count_nonzero(found)), data.size):
        return None
    return Sparse(data.size, np.packbits(found, bitorder="little"), data[np.flatnonzero(found)])


def fill(nbytes: int, marks: Bytes, values: Callable[[int], Bytes]) -> Bytes:
    """The bytes again. values: gives as many as it is asked for. Raises DamagedError."""
    line = np.unpackbits(marks, bitorder="little")
    if line[nbytes:].any():
        raise DamagedError("marks go beyond the symbols")
    found: Bytes = line[:nbytes]
    places = np.flatnonzero(found)
    found[places] = values(places.size)
    return found
