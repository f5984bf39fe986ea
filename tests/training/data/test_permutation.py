"""The order of an epoch: a bijection at any size, the same for ever, and as good as shuffled."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stepwell.errors import DataError
from stepwell.training.data import permutation
from stepwell.training.data.cursor import Cursor
from stepwell.training.data.cut import Cut
from stepwell.training.data.permutation import MOST, Permutation
from stepwell.training.data.sampler import PlainSampler


def order(count: int, seed: int = 1, epoch: int = 0) -> list[int]:
    return Permutation(count, seed=seed, epoch=epoch).at(torch.arange(count)).tolist()


# -- a bijection ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["sorted", "network"])
def test_every_sample_comes_once(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if how == "network":
        monkeypatch.setattr(permutation, "_SORTED", -1)
    for count in [*range(700), 4095, 4096, 4097, 5000]:
        assert sorted(order(count, seed=count)) == list(range(count)), count


@pytest.mark.parametrize("count", [65_536, 65_537, 100_003, (1 << 20) + 1])
def test_every_sample_comes_once_where_the_network_begins(count: int) -> None:
    assert torch.equal(torch.tensor(order(count)).sort().values, torch.arange(count))


@settings(max_examples=200, deadline=None)
@given(st.integers(1, MOST), st.integers(0, 1 << 64), st.integers(0, 1 << 20), st.data())
def test_there_and_back(count: int, seed: int, epoch: int, data: st.DataObject) -> None:
    chosen = Permutation(count, seed=seed, epoch=epoch)
    positions = torch.tensor(data.draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=20)))
    samples = chosen.at(positions)
    assert bool((samples >= 0).all()) and bool((samples < count).all())
    assert torch.equal(chosen.find(samples), positions)


@pytest.mark.parametrize("count", [0, 1, 37, 5000, 70_000])
def test_from_any_position_on(count: int) -> None:
    whole, sampler = order(count), PlainSampler(range(count), Cut(), 1, batched=False)
    for start in {0, 1, count // 3, max(0, count - 1), count}:
        sampler.seek(Cursor(0, start, start))
        assert list(sampler) == whole[start:]


@pytest.mark.parametrize("count", [-1, MOST + 1])
def test_counts_that_cannot_be(count: int) -> None:
    with pytest.raises(DataError, match="samples"):
        Permutation(count, seed=1, epoch=0)


# -- the same for ever ------------------------------------------------------------------------------------------------

GOLDEN = {
    (5, 0, 0): [4, 3, 0, 0, 2],
    (1000, 7, 3): [470, 760, 531, 90, 679],
    (65536, 1, 2): [35087, 47100, 46972, 36409, 1616],
    (65537, 1, 2): [23472, 33237, 46215, 11212, 54659],
    (1281167, 7, 0): [395773, 425134, 576907, 1027731, 684307],
    (10**9, 7, 1): [357405985, 599014995, 126227334, 516674253, 127169335],
    ((1 << 30) + 1, 1 << 63, 5): [126851004, 559878888, 462005557, 607667845, 285221571],
    (10**12, 0, 10**6): [482256485487, 416023701870, 859114441040, 549508856491, 70815565109],
    (1 << 60, 1, 1): [
        87704563481804433,
        164141872883006641,
        147226366197145120,
        320357830003543679,
        637695009469467255,
    ],
}
"""Samples at the positions 0, 1, 2, the middle and the last, by (count, seed, epoch)."""


@pytest.mark.parametrize(("count", "seed", "epoch"), list(GOLDEN))
def test_the_order_never_changes(count: int, seed: int, epoch: int) -> None:
    """If this fails the order is another one: it needs another name (`ORDER`), and old runs the old one."""
    positions = torch.tensor([0, 1, 2, count // 2, count - 1])
    assert Permutation(count, seed=seed, epoch=epoch).at(positions).tolist() == GOLDEN[count, seed, epoch]


def test_seed_and_epoch_are_not_added_up() -> None:
    """With `seed + epoch` the second epoch of one run is the first of another."""
    seen = {tuple(order(50, seed=seed, epoch=epoch)) for seed in range(20) for epoch in range(20)}
    assert len(seen) == 400


def test_the_global_generators_are_left_alone() -> None:
    before = torch.get_rng_state(), random.getstate()
    order(70_000)
    assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]


def test_a_late_position_of_many_samples_needs_no_list() -> None:
    """Which would be of 8 terabytes."""
    count = 10**12
    found = Permutation(count, seed=1, epoch=0).at(torch.arange(count - 32, count))
    assert len(set(found.tolist())) == 32


# -- as good as shuffled ----------------------------------------------------------------------------------------------


def surprises(count: int, seed: int) -> list[float]:
    """Seven ways to look at an order; for each how far, in standard deviations, it is from what chance does."""
    length = min(count, 200_000)
    positions = torch.arange(length)
    now, then = (Permutation(count, seed=seed, epoch=epoch).at(positions) for epoch in (0, 1))
    side = math.isqrt(count)
    return [
        even((now[1:] - now[:-1]) % count, count),
        even((now[2:] - 2 * now[1:-1] + now[:-2]) % count, count),
        even((now[side:] - now[:-side]) % count, count) if side < length // 2 else even(now[::2], count),
        even((now[8:] - now[:-8]) % count, count),
        even((then - now) % count, count),
        even((now[0:-1:2] * 7 + now[1::2]) % count, count),
        even((now % 2) * (count // 2) + now // 2, count),
    ]


def even(values: torch.Tensor, count: int, bins: int = 256) -> float:
    """Chi-square of values that should be spread evenly over [0, count), as standard deviations from its mean."""
    found = torch.bincount((values.double() / count * bins).long().clamp(0, bins - 1), minlength=bins).double()
    expected = len(values) / bins
    return float((((found - expected) ** 2 / expected).sum() - (bins - 1)) / math.sqrt(2 * (bins - 1)))


@pytest.mark.parametrize(
    "count", [100_003, *(pytest.param(n, marks=pytest.mark.soak) for n in (1_281_167, 10**9, (1 << 30) + 1))]
)
def test_it_is_as_good_as_shuffled(count: int) -> None:
    found = [value for seed in range(10) for value in surprises(count, seed)]
    assert max(found) < 5.5, found


@pytest.mark.parametrize("rounds", [1, 2])
def test_control_fewer_rounds_are_not(rounds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(permutation, "_ROUNDS", rounds)
    assert max(surprises(10**9, 1)) > 50


@pytest.mark.soak
def test_few_samples_take_every_order() -> None:
    """All 120 orders of five samples, evenly."""
    counts: dict[tuple[int, ...], int] = {}
    for seed in range(12_000):
        found = tuple(order(5, seed=seed))
        counts[found] = counts.get(found, 0) + 1
    assert len(counts) == 120
    assert sum((value - 100) ** 2 / 100 for value in counts.values()) < 119 + 5.5 * math.sqrt(2 * 119)
