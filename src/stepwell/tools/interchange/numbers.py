"""Numbers in raw little-endian bytes, and how far two of them are apart, without numpy and without torch.

Owns:    the element types that can be read as numbers here; the others can only be equal or not.
"""

from __future__ import annotations

import math
import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from operator import ne, sub
from typing import Final

from stepwell.storage.format import dtypes

_ARRAYS: Final = {
    "float64": "d",
    "float32": "f",
    "complex128": "d",
    "complex64": "f",
    "bool": "B",
    "int8": "b",
    "uint8": "B",
    "int16": "h",
    "uint16": "H",
    "int32": "i",
    "uint32": "I",
    "int64": "q",
    "uint64": "Q",
}
_WORDS: Final = {1: "B", 2: "H", 4: "I", 8: "Q", 16: "Q"}


@dataclass(frozen=True)
class Distance:
    """How two tensors differ.

    different:   elements whose bytes differ
    largest:     largest absolute difference of finite numbers (of real and imaginary parts, for complex ones); None for
                 an element type that is not read as numbers
    non_finite:  elements that differ and are infinite or undefined on one side at least
    """

    different: int = 0
    largest: float | None = 0.0
    non_finite: int = 0

    def __add__(self, other: Distance) -> Distance:
        largest = None if self.largest is None or other.largest is None else max(self.largest, other.largest)
        return Distance(self.different + other.different, largest, self.non_finite + other.non_finite)


def distance(dtype: str, a: bytes, b: bytes) -> Distance:
    """Compare two pieces of the same type and length, whole elements each."""
    if a == b:
        return Distance()
    different = _count_different(dtypes.itemsize(dtype), a, b)
    x, y = to_numbers(dtype, a), to_numbers(dtype, b)
    if x is None or y is None:
        return Distance(different, None)
    gaps = list(map(abs, map(sub, x, y)))
    if math.isfinite(sum(gaps)):
        return Distance(different, float(max(gaps)))
    odd = sum(1 for gap, u, v in zip(gaps, x, y, strict=True) if not math.isfinite(gap) and not _is_same(u, v))
    return Distance(different, float(max((gap for gap in gaps if math.isfinite(gap)), default=0.0)), odd)


def _is_same(u: float, v: float) -> bool:
    return u == v or (u != u and v != v)


def _count_different(itemsize: int, a: bytes, b: bytes) -> int:
    x, y = array(_WORDS[itemsize], a), array(_WORDS[itemsize], b)
    if itemsize < 16:
        return sum(map(ne, x, y))
    return sum(1 for i in range(0, len(x), 2) if x[i : i + 2] != y[i : i + 2])


def to_numbers(dtype: str, data: bytes) -> Sequence[float] | None:
    """The elements as Python numbers (both parts of complex ones in turn); None for types that are not known here."""
    if dtype in _ARRAYS:
        return array(_ARRAYS[dtype], data)
    if dtype in ("float16", "complex32"):
        return struct.unpack(f"<{len(data) // 2}e", data)
    if dtype == "bfloat16":  # the upper half of a float32
        wide = bytearray(2 * len(data))
        wide[2::4], wide[3::4] = data[0::2], data[1::2]
        return array("f", bytes(wide))
    if dtype == "float8_e5m2":  # the upper half of a float16
        wide = bytearray(2 * len(data))
        wide[1::2] = data
        return struct.unpack(f"<{len(data)}e", wide)
    if dtype == "float8_e4m3fn":
        return [_E4M3[byte] for byte in data]
    return None


def _e4m3(byte: int) -> float:
    """One sign, four exponent (bias 7) and three mantissa bits; no infinities, all ones is undefined."""
    sign, exponent, mantissa = -1.0 if byte & 0x80 else 1.0, (byte >> 3) & 15, byte & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


_E4M3: Final = tuple(_e4m3(byte) for byte in range(256))
