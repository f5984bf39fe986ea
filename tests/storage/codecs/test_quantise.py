"""Packing, the two other quantisers, and that writer and reader do the same with any values."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from stepwell.storage.codecs.codec_spec import LC, Spec, Ternary, Uniform
from stepwell.storage.codecs.histogram import CHUNK, measure
from stepwell.storage.codecs.quantise import Decoder, Scratch, pack, packed_nbytes, unpack
from stepwell.storage.codecs.tables import BucketTable, SignTable, StepTable, make_table
from tests.storage.codecs.walks import Pair

SPECS = [LC(2), LC(3), LC(2, "tensor", "huffman"), LC(3, "tensor", "huffman"), Ternary(), Uniform(1.0), Uniform(0.25)]
ANY = hnp.arrays(np.float32, st.integers(0, 40), elements=st.floats(width=32))


@pytest.mark.parametrize("bits", [2, 4, 8])
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_packing(bits: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(0, 100))
    codes = data.draw(hnp.arrays(np.uint8, count, elements=st.integers(0, 2**bits - 1)))
    nbytes = packed_nbytes(count, bits)
    padded = np.zeros(nbytes * 8 // bits, np.uint8)
    padded[:count] = codes
    packed = np.empty(nbytes, np.uint8)
    pack(padded, bits, packed)
    assert unpack(packed, bits)[:count].tolist() == codes.tolist()
    # Symbol i lies in the bits from i * bits on, counted from the low end.
    whole = int.from_bytes(packed.tobytes(), "little")
    assert [(whole >> (i * bits)) & (2**bits - 1) for i in range(count)] == codes.tolist()


@pytest.mark.parametrize(
    ("table", "bits"),
    [(BucketTable((0x3F80, 0xBF80, 0x4000)), 2), (BucketTable((0x3F80, 0xC000, 0x4040, 0x3F00)), 4),
     (SignTable((0x3F80,)), 2), (StepTable((0x3F80,)), 8)],
)  # fmt: skip
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8, 1001, CHUNK])
@pytest.mark.parametrize("is_wide", [False, True])
def test_the_decoder_adds_what_the_table_says(
    table: BucketTable | SignTable | StepTable, bits: int, count: int, is_wide: bool
) -> None:
    rng = np.random.default_rng(count)
    padded = np.zeros(packed_nbytes(count, bits) * 8 // bits, np.uint8)
    padded[:count] = rng.integers(0, table.values.size, count)
    packed = np.empty(packed_nbytes(count, bits), np.uint8)
    pack(padded, bits, packed)
    state = rng.standard_normal(count).astype(np.float32)
    expected = state + table.values[padded[:count]]
    Decoder(table, bits, is_wide=is_wide).add(packed, state, Scratch(bits, CHUNK, is_wide=is_wide))
    assert state.tobytes() == expected.tobytes()


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.text)
@pytest.mark.parametrize("reuse", [False, True])
@given(data=st.data())
@settings(max_examples=15, deadline=None)
def test_reader_has_the_writers_bits_for_any_values(spec: Spec, reuse: bool, data: st.DataObject) -> None:
    base = data.draw(ANY)
    same = hnp.arrays(np.float32, base.shape, elements=st.floats(width=32))
    pair = Pair(spec, base, reuse=reuse)
    for value in data.draw(st.lists(same, min_size=1, max_size=3)):
        pair.send(value)  # asserts it
        finite = np.isfinite(value)
        assert np.isfinite(pair.state[finite]).all()


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.text)
def test_a_state_at_rest_is_reached(spec: Spec) -> None:
    """Whatever is left out now is sent later: nothing is starved for ever, an even field of differences neither."""
    target = np.concatenate([np.full(500, 1.0), np.full(500, -1.0), np.geomspace(1e-3, 10, 500)]).astype(np.float32)
    pair = Pair(spec, np.zeros(1500, np.float32))
    for _ in range(60):
        pair.send(target)
    assert np.abs(pair.state - target).max() < 1e-3


def test_ternary_and_uniform_come_from_counts() -> None:
    """The same table in any order of the entries: nothing comes from a sum of floats."""
    rng = np.random.default_rng(0)
    delta = (rng.standard_normal(50_000) * np.exp(rng.standard_normal(50_000))).astype(np.float32)
    rms = float(np.sqrt(np.square(delta.astype(np.float64)).mean()))
    for spec in (LC(3), Ternary(), Uniform(0.5)):
        heads = set()
        for _ in range(5):
            rng.shuffle(delta)
            heads.add(
                make_table(spec, measure([(delta, np.zeros_like(delta))], 7 if isinstance(spec, LC) else 0)).heads
            )
        assert len(heads) == 1
    table = make_table(Uniform(0.5), measure([(delta, np.zeros_like(delta))], 0))
    assert isinstance(table, StepTable) and 0.75 <= float(table.values[1]) / (0.5 * rms) <= 1.5


@pytest.mark.parametrize(("spec", "most"), [(Uniform(1.0), 0.35), (Uniform(0.25), 0.1), (Ternary(), 0.75)])
def test_one_record_leaves_about_what_the_notes_measured(spec: Spec, most: float) -> None:
    rng = np.random.default_rng(1)
    delta: NDArray[np.float32] = rng.standard_normal(30_000).astype(np.float32)
    pair = Pair(spec, np.zeros_like(delta))
    pair.send(delta)
    assert np.linalg.norm(delta - pair.state) / np.linalg.norm(delta) < most


def test_tables_are_used_again_and_made_anew() -> None:
    rng = np.random.default_rng(2)
    base = rng.standard_normal(10_000).astype(np.float32)
    value, pair, reused = base.copy(), Pair(LC(3), base, reuse=True), []
    for _ in range(24):
        value = value + rng.standard_normal(10_000).astype(np.float32) * np.float32(1e-3)
        pair.send(value)
        reused.append(pair.facts.reused)
    assert reused[0] == 0 and sum(reused) >= 12
    outlier = value.copy()
    outlier[5] += 1
    pair.send(outlier)  # beyond the table: it waits for one record at most
    pair.send(outlier)
    assert abs(pair.state[5] - outlier[5]) < 0.01


def test_a_step_far_too_small_for_what_comes_next() -> None:
    """Found by chance: a table that is used again meets differences beyond what its steps can count."""
    pair = Pair(Uniform(1.0), np.zeros(10, np.float32), reuse=True)
    pair.send(np.full(10, 1.6e-38, np.float32))
    target = np.full(10, 4.0, np.float32)
    for _ in range(30):
        pair.send(target)
    assert np.abs(pair.state - target).max() < 1e-3
