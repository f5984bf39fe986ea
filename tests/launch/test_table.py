"""The table's rules, without processes: single transitions, and thousands of random lives of a cluster."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from stepwell.errors import StateError
from stepwell.launch import exit_status
from stepwell.launch.slot_table import (
    Member,
    SlotTable,
    arrive,
    bury,
    count_workers,
    decode,
    enter,
    finish,
    give_up,
    refuse,
    settle,
    tell_to_leave,
)


def member(name: str, life: int = 0) -> Member:
    return Member(name, f"{name}.{life}", "host", 1)


def formed(slots: int = 3, spares: int = 1) -> SlotTable:
    """A job in its first round."""
    table = SlotTable((None,) * slots, slots + spares)
    for i in range(slots + spares):
        table = enter(table, member(f"n{i}"))
    return come(table, *range(slots))


def come(table: SlotTable, *slots: int, generation: int | None = None) -> SlotTable:
    """These agents arrive, and the round begins if it can."""
    last = table.generation if generation is None else generation
    for slot in slots:
        seat = table.slots[slot]
        assert seat is not None
        table = arrive(table, seat, last, None)
    return settle(table, (), (), 3)


def nodes(table: SlotTable) -> list[str]:
    return [seat.node for seat in table.seats()]


def test_the_first_who_come_get_the_slots() -> None:
    table = formed()
    assert table.is_running and table.generation == 1 and nodes(table) == ["n0", "n1", "n2"]
    assert [spare.node for spare in table.spares] == ["n3"]
    assert enter(table, member("n4")) == table  # 3 + 1 nodes are all there may be


def test_a_crash_in_place_moves_nobody() -> None:
    table = come(formed(), 1)
    assert not table.is_running and table.restarts == 1
    table = come(table, 0, 2)
    assert table.is_running and table.generation == 2 and nodes(table) == ["n0", "n1", "n2"]
    assert (table.blamed, table.blames) == ("n1", 1)


def test_a_dead_slot_waits_for_its_node_and_then_goes_to_the_spare() -> None:
    table = bury(formed(), {"n1.0"}, None)
    assert not table.is_running and table.empty() == [1]
    table = come(table, 0, 2)
    assert table.empty() == [1]  # the grace time
    back = enter(table, member("n1", 1))
    assert nodes(back) == ["n0", "n1", "n2"] and not back.empty()
    table = settle(table, {"n1.0"}, (), 3)
    assert nodes(table) == ["n0", "n3", "n2"] and not table.is_running  # the spare has to arrive itself
    table = come(table, 1)
    assert table.is_running and table.blames == 0  # who came first after a death is not to blame
    assert enter(table, member("n1", 1)).spares[0].node == "n1"  # too late: a spare


def test_who_says_goodbye_is_not_waited_for() -> None:
    table = come(bury(formed(), {"n1.0"}, None, is_goodbye=True), 0, 2)
    assert nodes(table) == ["n0", "n3", "n2"]


def test_a_second_agent_of_a_live_node_does_not_enter() -> None:
    table = formed()
    assert enter(table, member("n1", 1)) == table and enter(table, member("n3", 1)) == table


def test_who_does_not_arrive_is_replaced() -> None:
    table = come(formed(), 0, 2)
    assert settle(table, (), (), 3) == table
    table = settle(table, (), {"n1.0"}, 3)
    assert nodes(table) == ["n0", "n3", "n2"] and table.seat_of("n1.0") is None


def test_the_same_node_first_again_and_again_is_put_aside_if_there_is_a_spare() -> None:
    for spares, aside in ((1, {"n1"}), (0, set())):
        table = formed(3, spares)
        for _ in range(3):
            table = come(table, 1)
            table = come(table, 0, 2)
        assert table.quarantine.keys() == aside
        assert table.is_running == (not aside)


def test_two_nodes_in_turn_are_not_put_aside() -> None:
    table = formed()
    for first, *others in ((1, 0, 2), (0, 1, 2), (1, 0, 2), (0, 1, 2)):
        table = come(come(table, first), *others)
    assert not table.quarantine and table.is_running


def test_a_budget_ends_the_job() -> None:
    table = bury(formed(), {"n1.0"}, 0)
    assert table.over is not None and table.over.code == exit_status.OUT_OF_RESTARTS


def test_giving_up_says_which_slots() -> None:
    table = give_up(bury(formed(3, 0), {"n0.0", "n2.0"}, None), 5)
    assert table.over is not None and table.over.code == exit_status.OUT_OF_SPARES
    assert "slots 0, 2 lost" in table.over.reason
    table = give_up(enter(SlotTable((None, None), 2), member("a")), 5)
    assert table.over is not None and "only 1 of 2 nodes joined" in table.over.reason
    assert give_up(formed(), 5).over is None


def test_the_end() -> None:
    table = finish(finish(formed(), "n0.0"), "n1.0")
    assert table.over is None and table.watched() == ["n2.0", "n3.0"]  # those that ended may go
    done = finish(table, "n2.0").over
    assert done is not None and done.code == exit_status.DONE
    lost = bury(table, {"n2.0"}, None).over
    assert lost is not None and lost.code == exit_status.REQUEUE
    failed = come(table, 2).over
    assert failed is not None and failed.code == exit_status.FAILED


def test_told_to_leave_is_over_when_the_workers_are_gone() -> None:
    table = tell_to_leave(formed(), "a notice")
    assert table.is_running and table.over is None
    over = come(table, 2).over
    assert over is not None and over.code == exit_status.REQUEUE


def test_quarantine_and_numbers_of_workers() -> None:
    table = refuse(formed(), member("n3"), "its disk is full")
    assert not table.spares and enter(table, member("n3", 1)) == table
    table = count_workers(formed(), member("n0"), 8)
    assert count_workers(table, member("n1"), 8) == table
    table = count_workers(table, member("n1"), 7)
    assert not table.is_running and "7 workers" in table.quarantine["n1"]


def test_the_document_comes_back() -> None:
    table = replace(come(bury(formed(), {"n1.0"}, None), 0), quarantine={"x": "y"}, leaving="why")
    assert decode(table.encode().encode()) == table
    done = finish(formed(1, 0), "n0.0")
    assert decode(done.encode().encode()) == done
    for data in (b"", b"{}", b"[]", b"null", b'{"format":"other"}', table.encode().replace("agent", "x").encode()):
        with pytest.raises(StateError):
            decode(data)


@pytest.mark.parametrize("seed", range(200))
def test_random_lives(seed: int) -> None:
    """Agents die, come and crash in any order: nobody healthy is displaced, and a round always forms again."""
    draw = random.Random(seed)
    slots, spares = draw.randint(1, 5), draw.randint(0, 3)
    table = SlotTable((None,) * slots, slots + spares)
    last: dict[str, int] = {}
    lives = {f"n{i}": 0 for i in range(slots + spares)}
    alive: dict[str, Member] = {}

    def act(table: SlotTable, who: str) -> SlotTable:
        """What an agent would do now."""
        me = alive[who]
        if not table.has(me.agent):
            return enter(table, me)
        if table.is_running or me.agent in table.arrived or table.seat_of(me.agent) is None:
            return settle(table, table.dead, (), 0)
        return arrive(table, me, last.get(me.agent, 0), None)

    for _ in range(300):
        before, who = table, draw.choice(list(lives))
        event = draw.random()
        if who in alive and event < 0.05:
            agent = alive.pop(who).agent
            table = bury(table, {agent}, None, is_goodbye=draw.random() < 0.3)
        elif who not in alive and event < 0.3:
            lives[who] += 1
            alive[who] = member(who, lives[who])
        elif who in alive and event < 0.4 and table.is_running and table.seat_of(alive[who].agent) is not None:
            table = arrive(table, alive[who], table.generation, None)
        elif who in alive:
            table = act(table, who)
        check(before, table)
        if table.is_running:
            last |= {seat.agent: table.generation for seat in table.seats()}
    for who in lives:
        if who not in alive:
            lives[who] += 1
            alive[who] = member(who, lives[who])
    for _ in range(20):
        for who in lives:
            before, table = table, act(table, who)
            check(before, table)
            if table.is_running:
                last |= {seat.agent: table.generation for seat in table.seats()}
    assert table.is_running and len(table.spares) == spares and not table.dead


def check(before: SlotTable, after: SlotTable) -> None:
    for old, new in zip(before.slots, after.slots, strict=True):
        if old is not None and new is not None and old.agent != new.agent:
            assert old.agent in before.dead, "a live agent was displaced"
    members = [seat.node for seat in after.seats()] + [spare.node for spare in after.spares]
    assert len(members) == len(set(members)) <= after.most
    assert after.generation - before.generation in (0, 1)
    if after.is_running:
        assert not after.empty()
    if after.generation > before.generation:
        assert all(seat.agent in before.arrived for seat in after.seats())
    assert decode(after.encode().encode()) == after
