"""Which snapshot comes next, and when one is given up."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from stepwell.agent.offer import make_offer
from stepwell.agent.pending import AgentLayout, Layouts, Pending, Purpose, Stage
from stepwell.agent.queue import PendingQueue
from stepwell.handover.memory import PAGE, Arena, ArenaShape
from stepwell.handover.protocol import Begin, NewLayout
from stepwell.types import CheckpointId, Owner
from tests.agent.puppet import make_request


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena.allocate(ArenaShape(1, 2, PAGE, 0))
    yield arena
    arena.close()


def make(arena: Arena, sequence: int, slot: int) -> Pending:
    layout = AgentLayout(1, 100, 0, (), {})
    id = CheckpointId(sequence, 0, 1)
    return Pending("run", id, Owner(), arena, layout, Begin(make_request(sequence), sequence, slot, 1, 1, 0))


def complete(item: Pending) -> None:
    item.arena.set_sequence(item.slot, item.sequence)
    item.arena.set_verdict(item.slot, item.sequence, is_good=True)


def test_only_complete_ones_are_due_and_the_oldest_first(arena: Arena) -> None:
    queue, first, second = PendingQueue(), make(arena, 1, 0), make(arena, 2, 1)
    queue.add(second)
    queue.add(first)
    assert queue.next_due() is None and queue.has_incomplete()
    complete(second)
    assert queue.next_due() is second
    complete(first)
    assert queue.next_due() is first and not queue.has_incomplete()


def test_bytes_without_a_verdict_are_not_complete(arena: Arena) -> None:
    item = make(arena, 1, 0)
    arena.set_sequence(0, 1)
    assert not item.is_complete and not item.is_void
    arena.set_verdict(0, 1, is_good=False)
    assert not item.is_complete and item.is_void


def test_a_failed_one_is_given_up_only_for_a_newer_complete_one(arena: Arena) -> None:
    queue, first, second = PendingQueue(), make(arena, 1, 0), make(arena, 2, 1)
    queue.add(first)
    queue.add(second)
    complete(first)
    first.failures, first.not_before = 1, 1e18
    assert queue.collect(None) == []
    assert queue.next_due() is None  # its time has not come
    complete(second)
    assert queue.collect(None) == [first]
    assert queue.next_due() is second


def test_one_that_is_being_written_is_not_given_up(arena: Arena) -> None:
    """Its slot would be filled anew under the writer: a checkpoint with the bytes of two steps."""
    queue, first, second = PendingQueue(), make(arena, 1, 0), make(arena, 2, 1)
    for item in (first, second):
        queue.add(item)
        complete(item)
    first.failures = 1
    assert queue.collect(first) == []
    assert queue.collect(None) == [first]  # the control: not being written, it goes


@pytest.mark.parametrize("slots", [1, 2])
def test_with_one_slot_a_failed_one_makes_room_when_asked(slots: int) -> None:
    arena = Arena.allocate(ArenaShape(1, slots, PAGE, 0))
    queue, item = PendingQueue(), make(arena, 1, 0)
    queue.add(item)
    complete(item)
    queue.is_room_wanted = True
    assert queue.collect(None) == []  # it has not failed
    item.failures = 1
    assert queue.collect(item) == []  # it is being tried again
    assert queue.collect(None) == ([item] if slots == 1 else [])
    arena.close()


def test_void_and_done_ones_are_released(arena: Arena) -> None:
    queue, void, done = PendingQueue(), make(arena, 1, 0), make(arena, 2, 1)
    queue.add(void)
    queue.add(done)
    arena.set_verdict(0, 1, is_good=False)
    complete(done)
    done.ended = Stage.COMMITTED
    assert queue.collect(None) == [void, done] and not queue.items


def test_a_slot_that_is_filled_anew_drops_what_never_became_complete(arena: Arena) -> None:
    queue, old, new = PendingQueue(), make(arena, 1, 0), make(arena, 2, 0)
    queue.add(old)
    queue.add(new)
    assert queue.items == [new]


def test_the_death_of_the_trainer_drops_what_is_not_complete(arena: Arena) -> None:
    queue, complete_one, half = PendingQueue(), make(arena, 1, 0), make(arena, 2, 1)
    queue.add(complete_one)
    queue.add(half)
    complete(complete_one)
    queue.drop_incomplete()
    assert queue.items == [complete_one]


def test_one_whose_part_is_durable_is_not_given_up(arena: Arena) -> None:
    """It failed once, then it was written: of many ranks, the leader may be about to commit it."""
    queue, first, second = PendingQueue(), make(arena, 1, 0), make(arena, 2, 1)
    for item in (first, second):
        queue.add(item)
        complete(item)
    first.failures, first.written_at = 1, 5.0
    assert queue.collect(None) == []
    assert queue.written() == [first]
    first.written_at = None
    assert queue.collect(None) == [first]  # the control


def test_of_many_ranks_all_that_is_whole_is_offered(arena: Arena) -> None:
    """Another rank may have been killed before it had the newest."""
    queue = PendingQueue()
    items = [make(arena, 1, 0), make(arena, 2, 1)]
    for item in items:
        queue.add(item)
        complete(item)
    alone, _ = make_offer(queue.complete())
    assert [snapshot.slot for snapshot in alone.snapshots] == [1]
    for item in items:
        item.owner, item.record = Owner(0, 2), None
    many, fds = make_offer(queue.complete())
    assert [snapshot.slot for snapshot in many.snapshots] == [1, 0] and fds == [arena.fd]
    arena.claim(0)  # the older one is being overwritten
    again, _ = make_offer(queue.complete())
    assert [snapshot.slot for snapshot in again.snapshots] == [1]


def coded(arena: Arena, sequence: int, slot: int) -> Pending:
    item = make(arena, sequence, slot)
    item.is_wanted, item.purpose = False, Purpose.CODED_DELTA
    complete(item)
    return item


def test_what_came_coded_goes_into_its_chain_in_order_and_none_is_left_out(arena: Arena) -> None:
    queue, first, second = PendingQueue(), coded(arena, 1, 0), coded(arena, 2, 1)
    queue.add(first)
    queue.add(second)
    assert queue.collect(None) == [] and queue.next_delta() is first and queue.has_symbols()
    first.is_coded = True
    assert queue.collect(None) == [first] and queue.next_delta() is second
    second.is_coded = True
    assert queue.collect(None) == [second] and not queue.has_symbols()


def test_what_came_coded_is_no_state(arena: Arena) -> None:
    """It is not offered, not written as a checkpoint, and no failed checkpoint is given up for it."""
    queue, whole, symbols = PendingQueue(), make(arena, 1, 0), coded(arena, 2, 1)
    complete(whole)
    whole.failures = 1
    queue.add(whole)
    queue.add(symbols)
    assert queue.collect(None) == [] and queue.complete() == [whole]
    queue.want_newest()
    assert queue.items == [whole, symbols], "what is complete still goes into its chain after a trainer's death"
    assert not symbols.is_wanted and queue.next_due() is whole


def test_only_the_newest_layouts_of_each_kind_are_kept() -> None:
    layouts = Layouts()
    for number in range(1, 101):
        layouts.add(NewLayout(number, number, 0, leaves=(), versions={}, is_partial=number % 10 == 0))
    assert len(layouts) == 4
    assert [layouts[number].nbytes for number in (99, 98, 100, 90)] == [99, 98, 100, 90]
