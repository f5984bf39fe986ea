"""Sets of ranks as text: short, the same for the same set, and for no other one."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepwell.ranks import rank_sets

SETS = st.lists(st.integers(0, 40), min_size=1, unique=True).map(sorted)


@settings(deadline=None)
@given(SETS)
def test_what_is_written_is_read(ranks: list[int]) -> None:
    assert rank_sets.read(rank_sets.write(ranks)) == ranks


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([3], "3"),
        ([0, 1], "0-1"),
        ([0, 2], "0,2"),
        ([0, 2, 4], "0-4/2"),
        ([0, 1, 2, 5, 6], "0-2,5-6"),
        ([*range(8), *range(16, 24)], "0-7,16-23"),
        (range(1, 1024, 4), "1-1021/4"),
        (range(10_240), "0-10239"),
    ],
)
def test_ranges(ranks: list[int], text: str) -> None:
    assert rank_sets.write(ranks) == text == rank_sets.label(ranks)
    assert rank_sets.read(text) == list(ranks)


@settings(deadline=None)
@given(SETS, SETS)
def test_two_sets_have_two_labels(one: list[int], other: list[int]) -> None:
    assert (rank_sets.label(one) == rank_sets.label(other)) == (one == other)


def test_a_long_set_has_a_short_label() -> None:
    ranks = [rank for rank in range(4096) if rank // 8 % 2]
    found = rank_sets.label(ranks)
    assert found.startswith("8 and 2047 more #") and len(found) <= 64
    assert found == rank_sets.label(list(ranks)) != rank_sets.label([*ranks[:-1], 4096])


@settings(deadline=None)
@given(st.integers(1, 5000), st.integers(1, 9))
def test_who_stores_is_spread_evenly(count: int, step: int) -> None:
    holders = range(0, count * step, step)
    found = rank_sets.storing(holders)
    assert len(found) == len(set(found)) == min(count, rank_sets.MOST_STORING) and set(found) <= set(holders)
    assert found[0] == 0 and count * step - found[-1] <= step * -(-count // len(found))
