"""Kills lie where they can be resumed from, in ascending order, and both kinds of victim get their share."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from stepwell.tools.prove.moments import MANY, VICTIMS, choose_moments


@given(count=st.integers(1, 12), ranks=st.integers(2, 9), seed=st.integers(0, 2**31))
def test_moments_of_many_ranks(count: int, ranks: int, seed: int) -> None:
    chance = random.Random(seed)
    moments = choose_moments(count, first=5, last=90, iteration_seconds=0.1, generator=chance, world_size=ranks)
    assert len(moments) == count
    for victim in MANY:
        assert sum(moment.victim == victim for moment in moments) >= min(2, count // 3)
    assert any(moment.ends_the_attempt for moment in moments), "or nothing would be resumed"
    assert all(0 <= moment.rank < ranks for moment in moments)
    assert {moment.label for moment in moments} <= {
        "everything",
        *(f"rank {rank}" for rank in range(ranks)),
        *(f"agent of rank {rank}" for rank in range(ranks)),
    }


@given(
    count=st.integers(1, 12),
    first=st.integers(1, 1000),
    length=st.integers(-3, 400),
    seconds=st.floats(0, 10),
    seed=st.integers(0, 2**31),
)
def test_moments(count: int, first: int, length: int, seconds: float, seed: int) -> None:
    last = first + length - 1
    moments = choose_moments(count, first=first, last=last, iteration_seconds=seconds, generator=random.Random(seed))
    steps = [moment.step for moment in moments]
    assert steps == sorted(set(steps))
    assert len(steps) == min(count, max(0, length))
    assert all(first <= step <= last for step in steps)
    assert all(0 <= moment.delay_seconds <= seconds for moment in moments)
    for victim in VICTIMS:
        share = sum(moment.victim == victim for moment in moments)
        assert share >= min(2, len(moments) // 2)


def test_the_seed_decides() -> None:
    def chosen(seed: int) -> object:
        return choose_moments(5, first=1, last=900, iteration_seconds=1.0, generator=random.Random(seed))

    assert chosen(1) == chosen(1)
    assert chosen(1) != chosen(2)


def test_steps_are_spread_over_the_whole_range() -> None:
    generator = random.Random(0)
    steps = [
        moment.step
        for _ in range(400)
        for moment in choose_moments(1, first=1, last=10, iteration_seconds=0.0, generator=generator)
    ]
    assert all(20 <= steps.count(step) <= 60 for step in range(1, 11))
