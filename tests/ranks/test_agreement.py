"""When all ranks checkpoint: plans lie ahead, one at a time, and who hears of one too late says so. No process here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from stepwell.ranks import agreement
from stepwell.ranks.agreement import Action, Agreement

Message = dict[str, Any]


class Ranks:
    """All ends in one process; messages wait in a list until `deliver`."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.late: list[tuple[int, int]] = []
        self.posted: list[tuple[int, Message]] = []
        self.ends = [Agreement(rank, size, self._sender(rank), self._noter(rank)) for rank in range(size)]

    def _sender(self, rank: int) -> Any:
        return lambda message: self.posted.append((rank, message))

    def _noter(self, rank: int) -> Any:
        return lambda step: self.late.append((rank, step))

    def deliver(self) -> list[Message]:
        """Bring what was sent, answers included. What it was."""
        told = []
        while self.posted:
            source, message = self.posted.pop(0)
            told.append(message)
            for rank in range(1, self.size) if source == 0 else [0]:
                self.ends[rank].on_message(source, message)
        return told

    def ready(self) -> None:
        for end in self.ends:
            end.tell_ready(True)
        self.deliver()


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """A clock that the test turns."""
    time = [0.0]
    monkeypatch.setattr(agreement.time, "monotonic", lambda: time[0])
    yield time


def walk(ranks: Ranks, steps: range, now: list[float], seconds: float, *wishes: str) -> dict[int, list[set[str]]]:
    """All ranks step by step together, rank 0 wishing; what was due, where something was."""
    due = {}
    for step in steps:
        now[0] += seconds
        found = [end.pass_step(step, wishes=wishes if rank == 0 else ()) for rank, end in enumerate(ranks.ends)]
        ranks.deliver()
        if any(found):
            due[step] = found
    return due


def test_a_plan_lies_ahead_and_is_the_same_step_everywhere(now: list[float]) -> None:
    ranks = Ranks(3)
    ranks.ready()
    due = walk(ranks, range(1, 20), now, 1.0, Action.SAVE)
    assert list(due) == [3, 6, 9, 12, 15, 18], "planned two steps ahead, and the next one when that has passed"
    assert all(found == [{Action.SAVE}] * 3 for found in due.values())
    assert ranks.late == []


def test_short_steps_are_planned_further_ahead(now: list[float]) -> None:
    ranks = Ranks(2)
    ranks.ready()
    due = walk(ranks, range(1, 40), now, 0.005, Action.SAVE)
    first, second, *_ = due
    assert second - first > 10, "0.05 s are ten steps"


def test_nothing_is_planned_before_all_have_memory(now: list[float]) -> None:
    ranks = Ranks(3)
    for end in ranks.ends[:2]:
        end.tell_ready(True)
    ranks.deliver()
    assert not walk(ranks, range(1, 10), now, 1.0, Action.SAVE, Action.MEMORY)
    ranks.ends[2].tell_ready(True)
    ranks.deliver()
    assert walk(ranks, range(10, 20), now, 1.0, Action.SAVE)
    ranks.ends[1].tell_ready(False)
    ranks.deliver()
    assert not walk(ranks, range(22, 30), now, 1.0, Action.SAVE)


@pytest.mark.parametrize("what", [Action.LEAVE, Action.LOOK_AGAIN])
def test_what_needs_no_memory_does_not_wait_for_it(what: str, now: list[float]) -> None:
    assert list(walk(Ranks(2), range(1, 5), now, 1.0, what)) == [3]


def test_readiness_is_told_once(now: list[float]) -> None:
    ranks = Ranks(2)
    for _ in range(3):
        ranks.ends[1].tell_ready(True)
    assert len(ranks.posted) == 1


def test_one_plan_at_a_time_but_leaving_does_not_wait(now: list[float]) -> None:
    ranks = Ranks(2)
    ranks.ready()
    leader = ranks.ends[0]
    leader.pass_step(1, wishes=[Action.SAVE, Action.MEMORY])
    assert [message["what"] for message in ranks.deliver()] == ["save"]
    leader.pass_step(2, wishes=[Action.MEMORY, Action.LEAVE, Action.LEAVE])
    told = ranks.deliver()
    assert [message["what"] for message in told] == ["leave"]
    assert told[0]["step"] > 3, "another step than that of the plan before"


def test_only_rank_0_plans(now: list[float]) -> None:
    ranks = Ranks(2)
    ranks.ready()
    ranks.ends[1].pass_step(1, wishes=[Action.SAVE])
    assert ranks.deliver() == []


def test_who_has_passed_the_step_says_so_and_the_next_plan_looks_further(now: list[float]) -> None:
    ranks = Ranks(3)
    ranks.ready()
    now[0] += 1
    ranks.ends[0].pass_step(1, wishes=[Action.SAVE])  # for step 3
    for step in range(1, 8):
        ranks.ends[2].pass_step(step)
    told = ranks.deliver()
    assert ranks.late == [(2, 3)]
    assert told[-1] == {"type": "late", "step": 7}
    assert ranks.ends[2].pass_step(8) == set(), "it has no part in it"
    assert ranks.ends[1].pass_step(3) == {Action.SAVE}
    assert ranks.ends[0].pass_step(3) == {Action.SAVE}
    ranks.ends[0].pass_step(4, wishes=[Action.SAVE])
    (plan,) = ranks.deliver()
    assert plan["step"] > 7, "beyond the furthest"


@pytest.mark.parametrize("what", [Action.MEMORY, Action.LOOK_AGAIN])
def test_nothing_is_void_for_a_late_plan_that_saves_nothing(what: str, now: list[float]) -> None:
    ranks = Ranks(2)
    ranks.ready()
    ranks.ends[1].pass_step(9)
    ranks.ends[0].pass_step(1, wishes=[what])
    assert ranks.deliver()[-1]["type"] == "late"
    assert ranks.late == []


def test_a_rank_that_hears_too_late_of_leaving_leaves_all_the_same(now: list[float]) -> None:
    """The others are gone: alone it would wait in training's next collective."""
    ranks = Ranks(2)
    ranks.ready()
    ranks.ends[1].pass_step(9)
    ranks.ends[0].pass_step(1, wishes=[Action.LEAVE])
    ranks.deliver()
    assert ranks.ends[1].pass_step(10) == {Action.LEAVE}


def test_being_told_to_leave_is_said_once(now: list[float]) -> None:
    ranks = Ranks(2)
    for _ in range(3):
        ranks.ends[1].ask_to_leave()
    assert [message["type"] for _, message in ranks.posted] == ["leave"]
    ranks.ends[0].ask_to_leave()
    assert len(ranks.posted) == 1, "rank 0 plans it"


def test_the_distance_has_a_limit(now: list[float]) -> None:
    ranks = Ranks(2)
    ranks.ready()
    for _ in range(30):
        ranks.ends[0].on_message(1, {"type": "late", "step": 5})
    walk(ranks, range(1, 6), now, 1.0)
    now[0] += 1.0
    ranks.ends[0].pass_step(6, wishes=[Action.SAVE])
    (plan,) = ranks.deliver()
    assert plan["step"] == 6 + 30
