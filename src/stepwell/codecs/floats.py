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
AnyArray = NDArray[Any]

KEYS: Final = 512
"""A key is sign and exponent, the 9 top bits: below 256 positive, from 256 on negative."""
MANTISSA_BITS: Final = 23
MOST_EXPONENT: Final = 251
"""Differences with a larger exponent field (2^125 and more, infinity, NaN) are not coded: sums could overflow."""
_LARGEST_BF16: Final = 0x7F7F


def round_to_bf16(magnitude: float) -> int:
    """The top half of the float32 nearest in bfloat16, ties to even; never infinite. For magnitudes only."""
    bits = int(np.float32(magnitude).view(np.uint32))
    return min((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16, _LARGEST_BF16)


def middle(lo: int, hi: int) -> int:
    """Halfway between two magnitudes given by their bits, as bfloat16. Halved first: their sum may overflow."""
    low, high = (np.uint32(bits).view(np.float32) / np.float32(2) for bits in (lo, hi))
    return round_to_bf16(float(low + high))


def from_bf16(halves: NDArray[np.uint16]) -> Floats:
    """float32 values of bfloat16 bits."""
    wide: Words = halves.astype(np.uint32) << np.uint32(16)
    return wide.view(np.float32)


def is_finite(values: Floats) -> bool:
    """Whether no value is infinite or NaN; true for none. By two reductions, without room for a mask."""
    return not values.size or bool(np.isfinite(values.max()) and np.isfinite(values.min()))
