"""Rounds in a real store, with ranks that are threads: how many requests, and one outcome whoever is missing."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from stepwell.ranks.groups import store_rounds
from stepwell.ranks.groups.group import Absent
from stepwell.ranks.groups.store_rounds import Round

SECONDS = 20.0
SHORT = 1.5


class Counted:
    """One rank's connection to the store: counts requests, and can stop for good before one of them."""

    def __init__(self, store: Any, dies_before: int | None = None) -> None:
        self._store, self._dies_before = store, dies_before
        self.requests: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._store, name)

        def request(*arguments: Any) -> Any:
            if sum(self.requests.values()) == self._dies_before:
                raise Died
            self.requests[name] += 1
            return call(*arguments)

        return request


class Died(Exception):
    pass


@pytest.fixture
def store() -> Iterator[Any]:
    yield dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=SECONDS), wait_for_workers=False)


def play(
    stores: list[Counted],
    seconds: float,
    key: str = "round",
    held: int | None = None,
    until: Callable[[list[Any]], bool] = lambda found: True,
) -> list[Any]:
    """What each rank found: the messages, who is missing, or that it died. One is `held` until something is so."""
    found: list[Any] = [None] * len(stores)

    def rank(number: int) -> None:
        deadline = time.monotonic() + SECONDS
        while number == held and not until(found) and time.monotonic() < deadline:
            time.sleep(0.005)
        try:
            found[number] = Round(stores[number], key, number, len(stores)).meet(b'"call"\n%d' % number, seconds)
        except Absent as absent:
            found[number] = absent.ranks
        except Died:
            found[number] = "died"

    with ThreadPoolExecutor(len(stores)) as pool:
        list(pool.map(rank, range(len(stores))))
    return found


def whole(size: int) -> list[bytes]:
    return [b'"call"\n%d' % number for number in range(size)]


def test_requests_of_a_rank_do_not_follow_the_number_of_ranks(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_rounds, "_BATCH", 16)
    for size in (2, 8, 32, 96):
        stores = [Counted(store.clone()) for _ in range(size)]
        assert play(stores, SECONDS, f"of {size}") == [whole(size)] * size
        readers = [counted.requests["multi_get"] for counted in stores if counted.requests["multi_get"]]
        assert readers == [math.ceil(size / 16)]  # one rank reads them all, in batches
        counts = [counted.requests - Counter(multi_get=size) for counted in stores]
        assert sorted(count.total() for count in counts) == [3] + [4] * (size - 1), counts
        assert not any(counted.requests.keys() - {"set", "add", "wait", "get", "multi_get", "compare_set"}
                       for counted in stores)  # fmt: skip


def test_large_messages_come_whole(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_rounds, "_PART_BYTES", 1000)
    monkeypatch.setattr(store_rounds, "_FIRST_BYTES", 100)
    said = [b'"call"\n"%s"' % (b"%d" % rank * length) for rank, length in enumerate([1, 92, 93, 999, 5000])]
    this = [Round(store.clone(), "round", rank, 5) for rank in range(5)]
    with ThreadPoolExecutor(5) as pool:
        assert list(pool.map(lambda one, message: one.meet(message, SECONDS), this, said)) == [said] * 5
    keys = store.num_keys()
    for key in (key for one in this for key in one.own_keys):
        store.delete_key(key)
    assert keys > 20 and store.num_keys() <= 1  # what the store keeps for itself


@pytest.mark.parametrize("victim", [0, 4])
@pytest.mark.parametrize("is_last", [True, False])
@pytest.mark.parametrize("request_number", [0, 1, 2, 3])
def test_a_rank_that_dies_at_any_request(store: Any, victim: int, is_last: bool, request_number: int) -> None:
    stores = [Counted(store.clone(), request_number if rank == victim else None) for rank in range(5)]
    others = tuple(rank for rank in range(5) if rank != victim)

    def all_others_are_there(found: list[Any]) -> bool:
        return all(stores[rank].requests["add"] for rank in others)

    found = play(stores, SHORT, held=victim if is_last else None, until=all_others_are_there)
    expected = [victim] if request_number == 0 else whole(5)
    assert [found[rank] for rank in others] == [expected] * 4
    assert found[victim] == "died" or found[victim] == whole(5)


@pytest.mark.parametrize("victim", [0, 3])
def test_a_rank_that_is_late_learns_what_was_decided(store: Any, victim: int) -> None:
    found = play([Counted(store.clone()) for _ in range(4)], SHORT, held=victim, until=any)
    assert found == [[victim]] * 4


def test_one_decides_and_the_others_do_not_look(store: Any) -> None:
    size, missing = 40, [0, 7, 8, 39]
    stores = [Counted(store.clone()) for _ in range(size)]
    present = [rank for rank in range(size) if rank not in missing]

    def rank(number: int) -> list[int]:
        with pytest.raises(Absent) as raised:
            Round(stores[number], "round", number, size).meet(b"1\n1", SHORT)
        return raised.value.ranks

    with ThreadPoolExecutor(len(present)) as pool:
        assert list(pool.map(rank, present)) == [missing] * len(present)
    assert sum(counted.requests["check"] for counted in stores) < 100
    assert [counted.requests["check"] > 0 for counted in stores].count(True) == 1


def test_who_decides_may_die_over_it(store: Any) -> None:
    size = 4
    stores = [Counted(store.clone()) for _ in range(size)]
    stores[1] = Counted(store.clone(), 4)  # after set, add, the wait, and its claim to decide

    def rank(number: int) -> Any:
        try:
            return Round(stores[number], "round", number, size).meet(b"1\n1", SHORT / 2 if number == 1 else SHORT)
        except Absent as absent:
            return absent.ranks
        except Died:
            return "died"

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(rank, [1, 2, 3])) == ["died", [0], [0]]
