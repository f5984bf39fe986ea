"""Bits of float32: the key of a value, rounding to bfloat16, and which numbers a code may touch at all.

Holds:   integer operations only, so that another device gets the same bits.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]
Words = NDArray[np.uint32]
Halves = NDArray[np.uint16]
AnyArray = NDArray[Any]

KEYS: Final = 512
"""A key is sign and exponent, the 9 top bits: below 256 positive, from 256 on negative."""
MANTISSA_BITS: Final = 23
MOST_EXPONENT: Final = 251
"""Differences with a larger exponent field (2^125 and more, infinity, NaN) are not coded: sums could overflow."""
_LARGEST_BF16: Final = 0x7F7F


def round_to_bf16(magnitudes: NDArray[np.float64]) -> Halves:
    """The top half of the float32 nearest in bfloat16, ties to even; never infinite. For magnitudes only."""
    bits = magnitudes.astype(np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    found: Halves = np.minimum(rounded, np.uint32(_LARGEST_BF16)).astype(np.uint16)
    return found


def middle(lo: Words, hi: Words) -> Halves:
    """Halfway between magnitudes given by their bits, as bfloat16. Halved first: their sum may overflow."""
    low, high = (bits.view(np.float32) / np.float32(2) for bits in (lo, hi))
    return round_to_bf16((low + high).astype(np.float64))


def from_bf16(halves: Halves) -> Floats:
    """float32 values of bfloat16 bits."""
    wide: Words = halves.astype(np.uint32) << np.uint32(16)
    return wide.view(np.float32)


def is_finite(values: Floats) -> bool:
    """Whether no value is infinite or NaN; true for none. By two reductions, without room for a mask."""
    return not values.size or bool(np.isfinite(values.max()) and np.isfinite(values.min()))
