"""Sets of ranks: each rank once, never two of one domain, and no rank left out that need not be."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepwell.errors import ConfigError
from stepwell.levels.protect.sets import (
    losses_allowed,
    make_sets,
    pairs,
    ring,
)
from tests.levels.theory import is_recoverable_from_copies, is_recoverable_from_parity

DOMAINS = st.lists(st.integers(1, 9), max_size=9).flatmap(
    lambda counts: st.permutations([f"node{number}" for number, count in enumerate(counts) for _ in range(count)])
)
SIZES = st.integers(2, 9)
Holders = dict[int, tuple[int, ...]]
Kind = Callable[[Sequence[str]], Holders]
KINDS = pytest.mark.parametrize("kind", [pairs, ring])


def forced(domains: Sequence[str]) -> int:
    """Ranks that no division can protect: what one domain has more than all others together."""
    largest = max(Counter(domains).values(), default=0)
    return max(0, largest - (len(domains) - largest))


def nodes(count: int, each: int = 1) -> list[str]:
    return [f"node{number:03}" for number in range(count) for _ in range(each)]


def shapes(sets: Sequence[Sequence[int]]) -> list[int]:
    return sorted(map(len, sets), reverse=True)


# Sets for parity


@given(DOMAINS, SIZES)
def test_every_rank_once_and_no_two_of_one_domain(domains: list[str], size: int) -> None:
    sets, unprotected = make_sets(domains, size)
    assert sorted([rank for members in sets for rank in members] + unprotected) == list(range(len(domains)))
    for members in sets:
        assert len(members) >= 2
        assert len({domains[rank] for rank in members}) == len(members)
    assert len(unprotected) == forced(domains)
    assert make_sets(list(domains), size) == (sets, unprotected)


@given(DOMAINS, SIZES)
def test_sets_are_as_large_as_asked_where_that_can_be(domains: list[str], size: int) -> None:
    sets, unprotected = make_sets(domains, size)
    protected = Counter(domain for rank, domain in enumerate(domains) if rank not in unprotected)
    if not protected:
        assert sets == []
        return
    total, largest = sum(protected.values()), max(protected.values())
    if total >= size * largest:
        assert min(shapes(sets)) >= size
    else:  # there have to be as many sets as the largest domain has ranks
        assert len(sets) == largest
        assert shapes(sets)[0] - shapes(sets)[-1] <= 1


@given(st.integers(1, 40), st.integers(1, 8), SIZES)
def test_equal_domains_give_scr_s_sets(count: int, each: int, size: int) -> None:
    sets, unprotected = make_sets(nodes(count, each), size)
    assert unprotected == (list(range(each)) if count == 1 else [])
    if count > 1:
        assert shapes(sets)[0] - shapes(sets)[-1] <= 1
        assert len(sets) == each * max(1, count // size)
        assert all(len({rank % each for rank in members}) == 1 for members in sets)  # lines: one place in each domain


@pytest.mark.parametrize(
    ("count", "size", "expected"),
    [
        (9, 8, [9]),
        (16, 8, [8, 8]),
        (17, 8, [9, 8]),
        (15, 4, [5, 5, 5]),
        (3, 8, [3]),
        (2, 2, [2]),
        (1, 8, []),
        (0, 8, []),
    ],
)
def test_sets_of_one_rank_per_node(count: int, size: int, expected: list[int]) -> None:
    assert shapes(make_sets(nodes(count), size)[0]) == expected


def test_a_node_with_a_rank_less_changes_only_its_own_group() -> None:
    domains = nodes(64, 8)[:-1]
    sets, unprotected = make_sets(domains, 8)
    assert unprotected == []
    assert min(shapes(sets)) >= 8
    together = {frozenset(domains[rank] for rank in members) for members in sets}
    assert len(together) <= 10  # of eight groups; dealt over all nodes it would be hundreds


def test_unbalanced_nodes() -> None:
    domains = [*"AAABCCCCC"]
    sets, unprotected = make_sets(domains, 4)
    assert unprotected == [8]
    assert [{domains[rank] for rank in members} for members in sets] == [{"A", "C"}] * 3 + [{"B", "C"}]


def partitions(ranks: Sequence[int]) -> Iterator[list[list[int]]]:
    if not ranks:
        yield []
        return
    first, rest = ranks[0], ranks[1:]
    for smaller in partitions(rest):
        yield [[first], *smaller]
        for place, members in enumerate(smaller):
            yield [*smaller[:place], [first, *members], *smaller[place + 1 :]]


@pytest.mark.parametrize("count", range(1, 7))
def test_no_division_does_better(count: int) -> None:
    """Against all divisions of a few ranks: nobody is left out needlessly, and the smallest set is as large as it can
    be, up to the size that was asked for."""
    every = list(partitions(range(count)))
    for domains in product("ABCD", repeat=count):
        if list(dict.fromkeys(domains)) != sorted(set(domains)):
            continue  # the same with other names
        allowed = [sets for sets in every if all(len({domains[r] for r in one}) == len(one) for one in sets)]
        fewest = min(sum(len(one) == 1 for one in sets) for sets in allowed)
        best = [sets for sets in allowed if sum(len(one) == 1 for one in sets) == fewest]
        smallest = max(min((len(one) for one in sets if len(one) > 1), default=0) for sets in best)
        for size in range(2, 5):
            sets, unprotected = make_sets(domains, size)
            assert len(unprotected) == fewest, domains
            assert min(min(map(len, sets), default=0), size) == min(smallest, size), (domains, size)


@pytest.mark.parametrize("size", [1, 0, -3])
def test_a_set_of_one_is_refused(size: int) -> None:
    with pytest.raises(ConfigError, match="at least 2"):
        make_sets(nodes(4), size)


# Copies


@KINDS
@given(domains=DOMAINS)
def test_a_copy_lies_in_another_domain_and_nobody_holds_two(kind: Kind, domains: list[str]) -> None:
    holders = kind(domains)
    assert list(holders) == list(range(len(domains)))
    assert sum(not found for found in holders.values()) == forced(domains)
    assert all(domains[holder] != domains[rank] for rank, found in holders.items() for holder in found)
    assert max(Counter(holder for found in holders.values() for holder in found).values(), default=0) <= 1


@given(DOMAINS)
def test_pairs_are_pairs_but_for_one_ring_of_three(domains: list[str]) -> None:
    holders = {rank: found[0] for rank, found in pairs(domains).items() if found}
    odd = [rank for rank, holder in holders.items() if holders[holder] != rank]
    assert len(odd) == (3 if len(holders) % 2 else 0)
    assert {holders[rank] for rank in odd} == set(odd)
    assert len({domains[rank] for rank in odd}) == len(odd)


def test_the_ring_is_the_next_node_s_rank_at_the_same_place() -> None:
    assert ring(nodes(4, 2)) == {rank: ((rank + 2) % 8,) for rank in range(8)}


def test_pairs_of_nodes_stay_together() -> None:
    """Two nodes hold each other's copies, so few pairs of nodes are fatal."""
    domains = nodes(8, 4)
    assert {(domains[rank], domains[holder]) for rank, (holder,) in pairs(domains).items()} == {
        (f"node{number:03}", f"node{number ^ 1:03}") for number in range(8)
    }


@KINDS
def test_one_domain_protects_nobody(kind: Kind) -> None:
    assert kind(["A", "A", "A"]) == {0: (), 1: (), 2: ()}
    assert kind([]) == {}


# What may be lost


@given(DOMAINS, SIZES)
def test_any_one_domain_may_be_lost(domains: list[str], size: int) -> None:
    sets, unprotected = make_sets(domains, size)
    for name in set(domains):
        lost = {rank for rank, domain in enumerate(domains) if domain == name}
        assert is_recoverable_from_parity(sets, 1, lost) == lost.isdisjoint(unprotected)
        for holders in (pairs(domains), ring(domains)):
            assert is_recoverable_from_copies(holders, lost) == all(holders[rank] for rank in lost)


def survivable(count: int, lost: int, test: Callable[[tuple[int, ...]], bool]) -> float:
    verdicts = [test(gone) for gone in combinations(range(count), lost)]
    return round(100 * sum(verdicts) / len(verdicts), 1)


@pytest.mark.parametrize(
    ("kind", "two", "three"),
    [
        (ring, 86.7, 62.9),
        (pairs, 93.3, 80.0),
        ((8, 1), 53.3, 0.0),
        ((4, 1), 80.0, 45.7),
        ((8, 2), 100.0, 80.0),
        ((8, 3), 100.0, 100.0),
    ],
)
def test_chances_of_sixteen_nodes(kind: Kind | tuple[int, int], two: float, three: float) -> None:
    """As enumerated by hand from SCR's schemes (percent of all losses of two and of three nodes)."""
    domains = nodes(16)
    if isinstance(kind, tuple):
        size, parity = kind
        sets, _ = make_sets(domains, size)
        found = [survivable(16, lost, lambda gone: is_recoverable_from_parity(sets, parity, gone)) for lost in (2, 3)]
    else:
        holders = kind(domains)
        found = [survivable(16, lost, lambda gone: is_recoverable_from_copies(holders, gone)) for lost in (2, 3)]
    assert found == [two, three]


def test_losses() -> None:
    assert [losses_allowed(members, 2) for members in (2, 3, 8)] == [1, 2, 2]
    assert is_recoverable_from_parity([(0, 1)], 2, [0])
    assert not is_recoverable_from_parity([(0, 1)], 2, [0, 1])
    assert not is_recoverable_from_parity([(0, 1)], 1, [2])  # in no set
    assert is_recoverable_from_parity([], 1, [])
    assert is_recoverable_from_copies({0: (1,), 1: (0,), 2: ()}, [1])
    assert not is_recoverable_from_copies({0: (1,), 1: (0,), 2: ()}, [2])
    assert not is_recoverable_from_copies({0: (1,)}, [5])  # of whom nothing is known
    assert is_recoverable_from_copies({0: (1, 2), 1: (2, 0), 2: (0, 1)}, [0, 1])
