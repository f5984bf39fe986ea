"""Element types: stepwell's name (torch's own), size, and the safetensors name where there is one.

A type that stock safetensors cannot express is stored as bytes (`U8`), its name kept in the record.
"""

from __future__ import annotations

from typing import Final

NATIVE: Final[dict[str, tuple[int, str]]] = {
    "bool": (1, "BOOL"),
    "uint8": (1, "U8"),
    "int8": (1, "I8"),
    "int16": (2, "I16"),
    "uint16": (2, "U16"),
    "float16": (2, "F16"),
    "bfloat16": (2, "BF16"),
    "int32": (4, "I32"),
    "uint32": (4, "U32"),
    "float32": (4, "F32"),
    "int64": (8, "I64"),
    "uint64": (8, "U64"),
    "float64": (8, "F64"),
    "float8_e4m3fn": (1, "F8_E4M3"),
    "float8_e5m2": (1, "F8_E5M2"),
}

SUB_BYTE: Final = tuple(f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8))

AS_BYTES: Final[dict[str, int]] = {
    "complex32": 4,
    "complex64": 8,
    "complex128": 16,
    "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,
    **dict.fromkeys(SUB_BYTE, 1),
    **dict.fromkeys(("bits8", "bits1x8", "bits2x4", "bits4x2"), 1),
    "bits16": 2,
}

FLOATING: Final = frozenset(
    {"float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2", "complex64", "complex128"}
)


def itemsize(dtype: str) -> int:
    """Bytes of one element. Raises KeyError for a type the format does not know."""
    return NATIVE[dtype][0] if dtype in NATIVE else AS_BYTES[dtype]


def is_known(dtype: str) -> bool:
    """Whether a shard can hold this type."""
    return dtype in NATIVE or dtype in AS_BYTES


def stored_as(dtype: str, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    """How safetensors sees the leaf: its dtype and shape there."""
    if dtype in NATIVE:
        return NATIVE[dtype][1], shape
    return "U8", (element_count(shape) * AS_BYTES[dtype],)


def element_count(shape: tuple[int, ...]) -> int:
    """Product of the dimensions; 1 for a 0-dim tensor."""
    count = 1
    for size in shape:
        count *= size
    return count


STORED_BITS: Final[dict[str, int]] = {stored: size * 8 for size, stored in NATIVE.values()}
