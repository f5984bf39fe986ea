"""Saves that users ask for: who waits for one is told which ranks have not. No process here, and a clock of ours."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from stepwell.ranks import asked_saves
from stepwell.ranks.asked_saves import Asked

Message = dict[str, Any]
SECONDS = 600.0


class Ranks:
    """All ends in one process; what is sent arrives at once. `ended`: saves that rank 0 ended, by whom, for want of."""

    def __init__(self, size: int) -> None:
        self.ended: list[tuple[int, ...]] = []
        self.within: set[int] = set()
        self.count = 0
        self.ends = [
            Asked(
                rank,
                self._sender(rank, size),
                lambda other, message: self.deliver(0, other, message),
                lambda *facts: self.ended.append(facts),
                ranks=size,
                is_within_step=lambda rank=rank: rank in self.within,  # type: ignore[misc]
                seconds=SECONDS,
            )
            for rank in range(size)
        ]

    def _sender(self, rank: int, size: int) -> Any:
        def send(message: Message) -> None:
            for other in range(1, size) if rank == 0 else [0]:
                self.deliver(rank, other, message)

        return send

    def deliver(self, rank: int, other: int, message: Message) -> None:
        self.count += 1
        self.ends[other].on_message(rank, message)

    def pass_step(self, step: int, *ranks: int) -> None:
        for rank in ranks:
            self.ends[rank].pass_step(step)


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    time = [0.0]
    monkeypatch.setattr(asked_saves.time, "monotonic", lambda: time[0])
    yield time


def wait(ranks: Ranks, rank: int, now: list[float], seconds: float) -> str:
    """As whoever waits for the save of step 7 does, from second 0 on. What it was told last."""
    told = ""
    while now[0] < seconds and not ranks.ended:
        now[0] += ranks.ends[rank].slice_seconds
        told = ranks.ends[rank].explain(7, 0, now[0])
    return told


@pytest.mark.parametrize("by", [0, 1, 2])
def test_the_missing_ranks_are_named_with_their_step(by: int, now: list[float]) -> None:
    ranks = Ranks(3)
    ranks.pass_step(7, by)
    ranks.ends[by].ask(7, 0)
    first, second = (rank for rank in range(3) if rank != by)
    ranks.pass_step(5, first)
    ranks.pass_step(7, second)
    ranks.within.add(second)
    expected = f"not all ranks have called save() after step 7: rank {first} is at step 5, rank {second} is in step 8"
    assert ranks.ends[by].explain(7, 0, 60.0) == expected
    ranks.ends[first].ask(7, 0)
    assert "rank " not in ranks.ends[by].explain(7, 0, 60.0).replace(f"rank {second} is in step 8", "")
    ranks.ends[second].ask(7, 0)
    assert ranks.ends[by].explain(7, 0, 120.0) == "" and not ranks.ended


@pytest.mark.parametrize("by", [0, 1])
def test_a_rank_that_stays_in_the_next_step_has_no_part(by: int, now: list[float]) -> None:
    """Looked at twice, a minute apart. Control: one that is not in a step may still ask, until the time is over."""
    for is_within in (True, False):
        now[0], ranks = 0.0, Ranks(2)
        ranks.pass_step(7, 0, 1)
        ranks.ends[by].ask(7, 0)
        ranks.within |= {1 - by} if is_within else set()
        wait(ranks, by, now, 2 * SECONDS)
        assert ranks.ended == [(7, 0, by, 1 - by)]
        assert now[0] == (120.0 if is_within else SECONDS)


def test_a_rank_that_comes_to_the_save_late_is_waited_for(now: list[float]) -> None:
    """It is behind, in a step before: a look at it says nothing about whether it will ask."""
    ranks = Ranks(2)
    ranks.pass_step(7, 0)
    ranks.pass_step(6, 1)
    ranks.within.add(1)
    ranks.ends[0].ask(7, 0)
    assert wait(ranks, 0, now, SECONDS - 60).endswith("rank 1 is at step 6")
    ranks.pass_step(7, 1)
    ranks.ends[1].ask(7, 0)
    assert ranks.ends[0].explain(7, 0, SECONDS) == "" and not ranks.ended


def test_one_look_is_not_enough(now: list[float]) -> None:
    """A loop may be left by `break` with a batch in its hands, and save then."""
    ranks = Ranks(2)
    ranks.pass_step(7, 0, 1)
    ranks.ends[0].ask(7, 0)
    for _ in range(4):
        ranks.within ^= {1}
        now[0] += 60.0
        ranks.ends[0].explain(7, 0, now[0])
    assert not ranks.ended


def test_many_ranks_that_wait_for_a_slow_disk_do_not_flood_the_line(now: list[float]) -> None:
    """All have asked, and all wait: a question and an answer for each of them. Some are missing: a few more."""
    size = 64
    ranks = Ranks(size)
    ranks.pass_step(7, *range(size))
    for rank in range(size - 8):
        ranks.ends[rank].ask(7, 0)
    ranks.count = 0
    for rank in range(size - 8):
        told = ranks.ends[rank].explain(7, 0, 60.0)
        assert told.startswith("not all ranks have called save() after step 7: rank 56 is at step 7, ")
        assert told.endswith(", 4 more")
    assert ranks.count <= 16 * size
    for rank in range(size - 8, size):
        ranks.ends[rank].ask(7, 0)
    ranks.count = 0
    assert [ranks.ends[rank].explain(7, 0, 60.0) for rank in range(size)] == [""] * size
    assert ranks.count <= 2 * size
