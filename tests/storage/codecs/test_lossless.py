"""What is exact gives every bit back; what keeps the top bits never makes a zero of anything else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from stepwell.errors import DamagedError
from stepwell.storage.chain.chain_image import ChainImage
from stepwell.storage.codecs.assignment import CodedLeaf, Deltas, arrange
from stepwell.storage.codecs.codec_spec import Raw, Spec, Top, XorCodec, Zstd
from stepwell.storage.codecs.lossless import shuffle, top_codes, top_values, unshuffle
from stepwell.storage.codecs.parts import Memory, apply, code, read

WIDTHS = {"uint8": 1, "bfloat16": 2, "float32": 4, "float64": 8, "complex128": 16, "int64": 8}


def send(spec: Spec, leaf: CodedLeaf, values: list[NDArray[Any]]) -> list[bytes]:
    """Records of one leaf, read again; asserts that the reader has the writer's bits."""
    parts = arrange([leaf], Deltas(first_moments=spec) if leaf.dtype == "float32" else Deltas())
    writer, reader, records = ChainImage(parts), ChainImage(parts), []
    for value in values:
        (pieces,) = writer.split({leaf.name: value})
        records.append(b"".join(code(parts[0], pieces, writer.arrays[0], Memory())[0]))
        apply(parts[0], [read(parts[0], memoryview(records[-1]), Memory())], reader.arrays[0])
        assert writer.digest() == reader.digest()
        if parts[0].spec.is_exact:
            assert reader.leaves()[leaf.name].tobytes() == value.tobytes()
    return records


@pytest.mark.parametrize("dtype", WIDTHS)
@pytest.mark.parametrize("role", ["parameter", "moment1", "value"])
@given(data=st.data())
@settings(max_examples=15, deadline=None)
def test_element_types_that_are_not_quantised_are_exact(dtype: str, role: str, data: st.DataObject) -> None:
    count = data.draw(st.integers(0, 40))
    many = hnp.arrays(np.uint8, count * WIDTHS[dtype])
    values = data.draw(st.lists(many, min_size=1, max_size=3))
    spec: Spec = data.draw(st.sampled_from([Raw(), Zstd(), XorCodec()]))
    send(
        spec,
        CodedLeaf("x", dtype, (count,), role),
        [value.view(np.float32) if dtype == "float32" else value for value in values],
    )


@pytest.mark.parametrize("spec", [Raw(), Zstd(), XorCodec()])
def test_unchanged_takes_no_bytes(spec: Spec) -> None:
    value = np.arange(100, dtype=np.float32)
    first, second = send(spec, CodedLeaf("x", "float32", (100,), "moment1"), [value, value])
    assert first and not second


def test_non_contiguous_and_zero_dimensional() -> None:
    grid = np.arange(24, dtype=np.float32).reshape(4, 6)
    send(Raw(), CodedLeaf("x", "float32", (6, 4), "moment1"), [grid.T])
    send(XorCodec(), CodedLeaf("x", "float32", (), "moment1"), [np.float32(3) * np.ones((), np.float32)])


def test_xor_of_weights_that_hardly_move_is_small() -> None:
    rng = np.random.default_rng(0)
    before = rng.standard_normal(40_000).astype(np.float32).view(np.uint16)[1::2].copy()
    after = before + (rng.random(40_000) < 0.1).astype(np.uint16)
    _, record = send(XorCodec(), CodedLeaf("x", "bfloat16", (40_000,), "parameter"), [before, after])
    assert len(record) * 8 / 40_000 < 2


@given(hnp.arrays(np.uint8, st.integers(0, 20).map(lambda n: n * 4)), st.sampled_from([1, 2, 4]))
def test_shuffling(data: NDArray[np.uint8], width: int) -> None:
    assert unshuffle(np.frombuffer(shuffle(data, width), np.uint8), width).tobytes() == data.tobytes()


FINITE = hnp.arrays(
    np.float32, st.integers(1, 100), elements=st.floats(width=32, allow_nan=False, allow_infinity=False)
)


@given(FINITE, st.integers(0, 7))
@settings(max_examples=150, deadline=None)
def test_top_bits(values: NDArray[np.float32], mantissa: int) -> None:
    found = top_values(top_codes(values, mantissa), mantissa)
    assert ((found == 0) == (values == 0)).all() and (np.sign(found) == np.sign(values)).all()
    assert np.isfinite(found).all()
    normal = np.abs(values) >= np.finfo(np.float32).tiny
    off = np.abs(found[normal].astype(np.float64) - values[normal])
    assert (off <= np.abs(values[normal]).astype(np.float64) * 2.0 ** -(mantissa + 1)).all()
    assert (top_codes(found, mantissa) == top_codes(values, mantissa)).all(), "what is sent again does not move"


@given(st.lists(hnp.arrays(np.float32, 30, elements=st.floats(width=32)), min_size=1, max_size=4), st.integers(0, 7))
@settings(max_examples=80, deadline=None)
def test_top_goes_on_from_any_values(values: list[NDArray[np.float32]], mantissa: int) -> None:
    send(Top(mantissa), CodedLeaf("x", "float32", (30,), "moment1"), values)


def test_top_takes_nothing_where_nothing_changed() -> None:
    values = np.geomspace(1e-20, 1e20, 50).astype(np.float32)
    first, second, third = send(
        Top(3), CodedLeaf("x", "float32", (50,), "moment1"), [values, values, values * np.float32(1.0001)]
    )
    assert first and not second and len(third) < len(first)


@pytest.mark.parametrize("data", [b"\1", b"\1abc", b"\0abc", b"\0" + bytes(400)])
def test_bytes_that_are_no_record(data: bytes) -> None:
    (part,) = arrange([CodedLeaf("x", "float32", (50,), "moment1")], Deltas())
    with pytest.raises(DamagedError):
        apply(part, [read(part, memoryview(data), Memory())], np.zeros(50, np.float32))
