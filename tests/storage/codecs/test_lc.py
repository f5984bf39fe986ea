"""The paper's quantiser, against a reference by brute force, and all of its edge cases."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from stepwell.storage.codecs import histogram
from stepwell.storage.codecs.codec_spec import LC
from stepwell.storage.codecs.histogram import measure
from stepwell.storage.codecs.tables import BucketTable, make_table
from tests.storage.codecs.walks import Pair, check_nan_does_no_harm, check_small_steps_arrive, check_table_is_the_papers

BITS = st.sampled_from([2, 3])
NORMAL = st.floats(width=32, allow_nan=False, allow_infinity=False, allow_subnormal=False, min_value=-(2.0**124),
                   max_value=2.0**124)  # fmt: skip
SOME = hnp.arrays(np.float32, st.integers(1, 80), elements=NORMAL)
# Few different values: ties in exponent and in count are the rule, not the exception.
TIED = hnp.arrays(np.float32, st.integers(1, 60), elements=st.sampled_from([0, 1, 1.5, -1, -1.25, 2, -2, 4, -8, 0.5]))


@given(st.one_of(SOME, TIED), BITS)
@settings(max_examples=100, deadline=None)
def test_kept_buckets_and_their_representatives(delta: NDArray[np.float32], bits: int) -> None:
    if np.abs(delta).max() >= np.finfo(np.float32).tiny:
        check_table_is_the_papers(delta, bits)


@pytest.mark.parametrize("bits", [2, 3])
@pytest.mark.parametrize("seed", range(8))
def test_the_same_over_many_chunks(bits: int, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is found out early spares looking at it again, and never changes what is found in the end."""
    monkeypatch.setattr(histogram, "CHUNK", 512)
    rng = np.random.default_rng(seed)
    spread = np.exp(rng.standard_normal(6000) * (seed % 3))
    delta = (rng.standard_normal(6000) * spread).astype(np.float32)
    delta[::7] = 0
    if seed >= 4:
        delta = np.abs(delta)  # one sign only, but for a few
        delta[rng.integers(0, 6000, 5)] *= -1
    for order in (delta, np.sort(delta), np.sort(delta)[::-1].copy(), delta[np.argsort(np.abs(delta))]):
        check_table_is_the_papers(order, bits)


def test_the_tie_rule() -> None:
    """Exponent down, then count down, then plus first: two bits keep both signs of one exponent and one of the next."""
    delta = np.array([4, -4, 2, -2, -3, 1], np.float32)
    table = make_table(LC(bits=2), measure([(delta, np.zeros_like(delta))], 3))
    assert isinstance(table, BucketTable)
    assert table.values.tolist() == [0, 4, -4, -2.5]


@given(SOME, BITS)
@settings(max_examples=50, deadline=None)
def test_an_entry_is_off_by_half_of_itself_or_not_sent(delta: NDArray[np.float32], bits: int) -> None:
    pair = Pair(LC(bits=bits), np.zeros_like(delta))
    pair.send(delta)
    is_kept = pair.state != 0
    off = np.abs(delta.astype(np.float64) - pair.state)
    assert (off[is_kept] <= np.abs(delta[is_kept]).astype(np.float64) * (0.5 + 2.0**-8)).all()
    assert (pair.state[~is_kept] == 0).all()
    if is_kept.any() and not is_kept.all():  # what is not sent is no larger than what is
        assert np.abs(delta[~is_kept]).max() < 2 * np.abs(delta[is_kept]).min()


@given(NORMAL, BITS, st.integers(1, 50))
@settings(max_examples=60, deadline=None)
def test_equal_entries_are_exact_to_bfloat16(value: float, bits: int, count: int) -> None:
    delta = np.full(count, value, np.float32)
    pair = Pair(LC(bits=bits), np.zeros_like(delta))
    pair.send(delta)
    if abs(value) >= np.finfo(np.float32).tiny:
        assert np.abs(pair.state.astype(np.float64) - value).max() <= abs(float(np.float32(value))) * 2.0**-8


@pytest.mark.parametrize("bits", [2, 3])
def test_nothing_changed_takes_no_bytes(bits: int) -> None:
    base = np.linspace(-1, 1, 1000).astype(np.float32)
    pair = Pair(LC(bits=bits), base)
    assert pair.send(base) == b""
    subnormal = np.full(1000, 1e-40, np.float32)
    pair = Pair(LC(bits=bits), np.zeros(1000, np.float32))
    assert pair.send(subnormal) == b""
    assert pair.send(np.full(1000, -0.0, np.float32)) == b""
    assert pair.state.tobytes() == bytes(4000)


def test_an_outlier_takes_a_bucket_and_no_more() -> None:
    rng = np.random.default_rng(5)
    delta = rng.standard_normal(5000).astype(np.float32)
    delta[17] = 1e30
    pair = Pair(LC(bits=2), np.zeros(5000, np.float32))
    pair.send(delta)
    assert pair.facts.exact == 0 and abs(pair.state[17] / 1e30 - 1) < 0.01 and (pair.state != 0).sum() > 1


@pytest.mark.parametrize("huge", [3.4028235e38, -3.4028235e38, 2.0**126])
def test_near_the_end_of_the_range_nothing_overflows(huge: float) -> None:
    pair = Pair(LC(bits=3), np.full(100, -huge, np.float32))
    value = np.full(100, huge, np.float32)
    pair.send(value)
    assert pair.state.tobytes() == value.tobytes() and pair.facts.exact == 1


def test_the_state_never_overflows() -> None:
    """Largest values, with a difference that could be coded: what stands for it would lead beyond the range."""
    base = np.full(64, 3.4e38, np.float32)
    pair = Pair(LC(bits=2), base)
    value = base.copy()
    value[0], value[1] = 3.4028235e38, np.float32(3.4e38 - 4e35)
    pair.send(value)
    assert np.isfinite(pair.state).all()


def test_nan_and_infinity() -> None:
    check_nan_does_no_harm()


def test_small_steps_arrive() -> None:
    check_small_steps_arrive()


@pytest.mark.parametrize("spec", [LC(bits=2), LC(bits=3), LC(bits=3, entropy="huffman")])
def test_the_error_does_not_grow_along_a_chain(spec: LC) -> None:
    rng = np.random.default_rng(3)
    base = rng.standard_normal(20_000).astype(np.float32)
    value, pair, errors = base.copy(), Pair(spec, base), []
    for _ in range(40):
        value = value + rng.standard_normal(20_000).astype(np.float32) * np.float32(1e-3)
        pair.send(value)
        errors.append(float(np.linalg.norm(value - pair.state) / np.linalg.norm(value - base)))
    assert errors[-1] < errors[5] < errors[0] and errors[-1] < (0.4 if spec.bits == 2 else 0.1)
