"""Huffman coding: near the entropy, and back to the same symbols."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from stepwell.errors import DamagedError
from stepwell.storage.codecs import huffman


def counts_of(symbols: NDArray[np.uint8]) -> NDArray[np.int64]:
    return np.bincount(symbols, minlength=huffman.SYMBOLS)


@given(st.integers(1, 16), st.integers(1, 3 * huffman.BLOCK), st.integers(0, 2**32 - 1), st.floats(0, 3))
@settings(max_examples=20, deadline=None)
def test_symbols_come_back(kinds: int, count: int, seed: int, skew: float) -> None:
    rng = np.random.default_rng(seed)
    weights = np.exp(-skew * np.arange(kinds))
    symbols = rng.choice(kinds, count, p=weights / weights.sum()).astype(np.uint8)
    lengths = huffman.code_lengths(counts_of(symbols))
    assert huffman.load_table(huffman.dump_table(lengths)) == lengths
    data = huffman.encode(symbols, lengths)
    assert huffman.decode(data, count, lengths).tolist() == symbols.tolist()
    shares = counts_of(symbols)[counts_of(symbols) > 0] / count
    entropy = float(-(shares * np.log2(shares)).sum())
    mean = sum(int(n) * length for n, length in zip(counts_of(symbols), lengths, strict=True)) / count
    assert entropy <= mean + 1e-9 and mean <= entropy + 1


@given(hnp.arrays(np.int64, huffman.SYMBOLS, elements=st.integers(0, 2**40)))
@settings(max_examples=100, deadline=None)
def test_codes_are_prefix_free(counts: NDArray[np.int64]) -> None:
    lengths = huffman.code_lengths(counts)
    words = [f"{code:0{n}b}" for code, n in zip(huffman.canonical(lengths), lengths, strict=True) if n]
    assert len(words) == np.count_nonzero(counts)
    assert not any(a != b and b.startswith(a) for a in words for b in words) and len(set(words)) == len(words)


def test_the_worst_counts_have_codes_of_15_bits() -> None:
    fibonacci = [1, 1]
    while len(fibonacci) < 16:
        fibonacci.append(fibonacci[-1] + fibonacci[-2])
    assert max(huffman.code_lengths(np.array(fibonacci))) == 15


def test_an_older_table_is_used_while_a_new_one_would_not_pay() -> None:
    before = huffman.code_lengths(np.array([90, 5, 3, 2] + [0] * 12))
    assert huffman.choose(np.array([80, 10, 6, 4] + [0] * 12), before) == (before, True)
    assert huffman.choose(np.array([1, 1, 900, 2] + [0] * 12), before)[1] is False
    assert huffman.choose(np.array([80, 10, 6, 4, 1] + [0] * 11), before)[1] is False, "a symbol that has no code"


@given(st.binary(max_size=60), st.integers(1, 100))
@settings(max_examples=200, deadline=None)
def test_any_bytes_are_symbols_or_damage(data: bytes, count: int) -> None:
    lengths = huffman.code_lengths(np.array([50, 20, 10, 5] + [0] * 12))
    with contextlib.suppress(DamagedError):
        assert huffman.decode(data, count, lengths).size == count


@pytest.mark.parametrize("table", [bytes(8), b"\x11\x11" + bytes(6), b"\xff" * 7])
def test_a_table_that_is_none(table: bytes) -> None:
    with pytest.raises(DamagedError):
        huffman.load_table(table)
