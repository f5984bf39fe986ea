"""Numbers without numpy: the same as torch reads in the same bytes, for every type that is read."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stepwell.storage.format import dtypes
from stepwell.tools.interchange.numbers import Distance, distance, to_numbers
from stepwell.training.state.flatten import dtype_from

READ = [
    *("float64", "float32", "float16", "bfloat16", "float8_e5m2", "float8_e4m3fn", "bool"),
    *("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "complex64", "complex128"),
]


def by_torch(dtype: str, data: bytes) -> list[float]:
    """The elements as Python numbers, both parts of complex ones in turn."""
    tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype_from(dtype))
    if dtype.startswith("complex"):
        return [part for number in tensor.tolist() for part in (number.real, number.imag)]
    return [float(x) if isinstance(x, bool) else x for x in tensor.tolist()]


def same(a: float, b: float) -> bool:
    return a == b or (a != a and b != b)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([name for name in READ if name != "bool"]), st.binary(min_size=64, max_size=64))
def test_the_same_numbers_as_torch(dtype: str, data: bytes) -> None:
    found = to_numbers(dtype, data)
    assert found is not None
    expected = by_torch(dtype, data)
    assert len(found) == len(expected)
    assert all(same(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("dtype", ["float8_e5m2", "float8_e4m3fn"])
def test_every_eight_bit_number(dtype: str) -> None:
    data = bytes(range(256))
    found = to_numbers(dtype, data)
    assert found is not None
    assert all(same(a, b) for a, b in zip(found, by_torch(dtype, data), strict=True))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_sixteen_bit_number(dtype: str) -> None:
    data = b"".join(number.to_bytes(2, "little") for number in range(1 << 16))
    found = to_numbers(dtype, data)
    assert found is not None
    assert all(same(a, b) for a, b in zip(found, by_torch(dtype, data), strict=True))


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([name for name in READ if name != "bool"]),
    st.binary(min_size=64, max_size=64),
    st.binary(min_size=64, max_size=64),
)
def test_the_distance_is_that_of_the_numbers(dtype: str, a: bytes, b: bytes) -> None:
    found = distance(dtype, a, b)
    size = dtypes.itemsize(dtype)
    pieces = [(a[i : i + size], b[i : i + size]) for i in range(0, 64, size)]
    assert found.different == sum(x != y for x, y in pieces)
    gaps = [abs(x - y) for x, y in zip(by_torch(dtype, a), by_torch(dtype, b), strict=True)]
    finite = [gap for gap in gaps if math.isfinite(gap)]
    assert found.largest == float(max(finite, default=0.0))
    if len(finite) == len(gaps):
        assert found.non_finite == 0


def test_equal_bytes_are_equal_whatever_they_mean() -> None:
    nan = b"\xff" * 8
    assert distance("float32", nan, nan) == Distance()
    assert distance("bits8", b"abc", b"abc") == Distance()


def test_a_type_that_is_not_read_is_only_different() -> None:
    assert distance("bits8", b"abc", b"abd") == Distance(1, None)
    assert distance("float8_e8m0fnu", b"abc", b"xbd") == Distance(2, None)


def test_infinite_and_undefined_numbers() -> None:
    def pack(*numbers: float) -> bytes:
        return bytes(torch.tensor(numbers, dtype=torch.float32).numpy())

    inf, nan = math.inf, math.nan
    assert distance("float32", pack(1, nan, inf), pack(2, nan, inf)) == Distance(1, 1.0, 0)
    assert distance("float32", pack(1, nan, inf), pack(2, 0, -inf)) == Distance(3, 1.0, 2)
    assert distance("float32", pack(nan), pack(0)) == Distance(1, 0.0, 1)


def test_distances_add_up() -> None:
    assert Distance(1, 2.0, 1) + Distance(2, 0.5, 0) == Distance(3, 2.0, 1)
    assert Distance(1, None) + Distance(0, 0.0) == Distance(1, None)
