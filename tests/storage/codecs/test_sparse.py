"""Packed symbols as marks and values."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stepwell.errors import DamagedError
from stepwell.storage.chain import apply_on_device
from stepwell.storage.codecs import parts, zstd_frames
from stepwell.storage.codecs.assignment import CodedLeaf, Deltas, arrange
from stepwell.storage.codecs.codec_spec import LC, Ternary
from stepwell.storage.codecs.floats import Bytes
from stepwell.storage.codecs.parts import Memory
from stepwell.storage.codecs.sparse import LEAST_NBYTES, Filler, Sparse, is_sparse, thin


def symbols(nbytes: int, part: float, seed: int = 0) -> Bytes:
    rng = np.random.default_rng(seed)
    line: Bytes = np.where(rng.random(nbytes) < part, rng.integers(1, 256, nbytes), 0).astype(np.uint8)
    return line


class Source:
    def __init__(self, data: Bytes) -> None:
        self.data = data

    @property
    def left(self) -> int:
        return self.data.size

    def fill(self, room: memoryview) -> None:
        room[:], self.data = self.data[: len(room)].data, self.data[len(room) :]


def fill(sparse: Sparse, *sizes: int) -> bytes:
    """In pieces of these sizes; the last one is the rest."""
    whole = Filler(sparse.nbytes, Source(sparse.marks), Source(sparse.values)).whole()
    assert (whole.marks == sparse.marks).all() and (whole.values == sparse.values).all()
    filler, found = Filler(sparse.nbytes, Source(sparse.marks), Source(sparse.values)), b""
    for size in [*sizes, sparse.nbytes - sum(sizes)]:
        room = np.full(size, 0xEE, np.uint8)
        filler.fill(room.data)
        found += room.tobytes()
    return found


@pytest.mark.parametrize("part", [0, 1e-5, 0.01, 0.07, 0.2, 0.49])
def test_many_bytes_come_back(part: float) -> None:
    data = symbols(900_001, part)
    found = thin(data)
    assert found is not None
    assert found.marks.tobytes() == np.packbits(data != 0, bitorder="little").tobytes()
    assert found.values.tobytes() == data[data != 0].tobytes()
    assert fill(found) == fill(found, 1, 262_149, 300_003) == data.tobytes()


@given(
    st.integers(LEAST_NBYTES + 1, LEAST_NBYTES + 100),
    st.floats(0, 0.45),
    st.integers(0, 99),
    st.lists(st.integers(1, 99), max_size=30),
)
def test_bytes_come_back(nbytes: int, part: float, seed: int, sizes: list[int]) -> None:
    data = symbols(nbytes, part, seed)
    found = thin(data)
    assert found is not None and found.nbytes == nbytes and found.values.all()
    assert fill(found, *sizes) == data.tobytes()


def test_what_is_worth_it_depends_on_counts_alone() -> None:
    data = np.zeros(2 * LEAST_NBYTES, np.uint8)
    data[:LEAST_NBYTES] = 1
    assert thin(data) is not None and is_sparse(LEAST_NBYTES, data.size)
    data[-1] = 1
    assert thin(data) is None and not is_sparse(LEAST_NBYTES + 1, data.size)
    assert thin(np.zeros(LEAST_NBYTES, np.uint8)) is None
    assert not parts.is_thinned(LC(entropy="huffman")) and parts.is_thinned(LC()) and parts.is_thinned(Ternary())


def section(*frames_: bytes) -> memoryview:
    """Of a part of one group of 40000 entries, coded with the table of the record before."""
    marks = frames_[0]
    body = b"".join([len(marks).to_bytes(8, "little"), *frames_])
    return memoryview(bytes([parts.SPARSE, 1, 1, 0x80, 0x3F]) + len(body).to_bytes(8, "little") + body)


def apply(data: memoryview) -> np.ndarray:
    (part,) = arrange([CodedLeaf("a", "float32", (40000,), "parameter")], Deltas(parameters=Ternary()))
    state = np.zeros(40000, np.float32)
    parts.apply(part, [parts.read(part, data, Memory())], state)
    return state


def test_a_section_is_read_as_the_document_says() -> None:
    marks = np.zeros(1250, np.uint8)
    marks[0], marks[-1] = 0b10, 0x80
    state = apply(section(zstd_frames.compress(marks.tobytes()), zstd_frames.compress(bytes([0b0100, 0b10_00_00_00]))))
    assert np.flatnonzero(state).tolist() == [5, 39999]
    assert state[5] == 1 and state[-1] == -1
    empty = zstd_frames.compress(bytes(1250)), zstd_frames.compress(b"")
    assert not apply(section(*empty)).any()


@pytest.mark.parametrize(
    ("marks", "values", "said"),
    [
        (bytes(1249), b"", "1250"),
        (bytes(1251), b"", "1250"),
        (bytes(1249) + b"\1", b"", "1 values are missing"),
        (bytes(1249) + b"\1", b"\1\1", "more values"),
        (bytes(1250), bytes(10001), "at most 10000"),
    ],
)
def test_frames_that_do_not_fit(marks: bytes, values: bytes, said: str) -> None:
    with pytest.raises(DamagedError, match=said):
        apply(section(zstd_frames.compress(marks), zstd_frames.compress(values)))


def test_a_length_that_leads_out_of_the_section() -> None:
    data = bytearray(section(zstd_frames.compress(bytes(1250)), zstd_frames.compress(b"")))
    data[13:21] = (1 << 40).to_bytes(8, "little")
    with pytest.raises(DamagedError, match="too early"):
        apply(memoryview(bytes(data)))


@pytest.mark.parametrize("flags", [parts.SPARSE | parts.HUFFMAN, parts.SPARSE | parts.DICTIONARY, 32, 2, 4])
def test_flags_that_no_writer_of_ours_has(flags: int) -> None:
    data = bytearray(section(zstd_frames.compress(bytes(1250)), zstd_frames.compress(b"")))
    data[0] = flags
    with pytest.raises(DamagedError, match="newer stepwell"):
        apply(memoryview(bytes(data)))


def test_marks_beyond_the_symbols() -> None:
    few = Sparse(9, np.array([0, 0b10], np.uint8), np.ones(1, np.uint8))
    with pytest.raises(DamagedError, match="beyond"):
        fill(few)


def test_a_whole_one_with_marks_beyond_the_symbols() -> None:
    with pytest.raises(DamagedError, match="beyond"):
        Filler(9, Source(np.array([0, 0b10], np.uint8)), Source(np.ones(1, np.uint8))).whole()


@pytest.mark.parametrize("values", [0, 1, 3])
def test_as_many_values_as_marks_on_a_device(values: int) -> None:
    sparse = Sparse(9, np.array([1, 1], np.uint8), np.ones(values, np.uint8))
    with pytest.raises(DamagedError, match=f"2 marks and {values} values"):
        apply_on_device._up(sparse, torch.device("cpu"))
