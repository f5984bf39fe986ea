"""The arena is made ready in the background: what comes to nothing leaves nothing page-locked."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch

from stepwell.events import journal
from stepwell.handover.memory import Arena
from stepwell.training.snapshot.arrange import Arranger
from stepwell.training.snapshot.layout import Plan
from stepwell.training.snapshot.slots import SlotPool
from stepwell.training.state.capture import Capture
from stepwell.training.state.tracked import track


class Locks:
    """Counts, in the place of a driver."""

    def __init__(self) -> None:
        self.held: list[int] = []
        self.locked = 0

    def lock(self, arena: Arena) -> bool:
        self.locked += 1
        self.held.append(arena.address())
        return True

    def unlock(self, arena: Arena) -> None:
        self.held.remove(arena.address())


@pytest.fixture
def locks() -> Locks:
    return Locks()


@pytest.fixture
def pool(locks: Locks) -> SlotPool:
    log = journal.EventLog(Path(os.devnull), who="trainer")
    return SlotPool(slots=2, cap_bytes=None, pages=locks, log=log)


def plan() -> Plan:
    tracked = track({"model": torch.nn.Linear(8, 8)})
    return Arranger(tracked, lambda: 1).arrange(Capture(tracked).flatten({})).plan


def test_what_is_locked_is_unlocked_at_the_end(pool: SlotPool, locks: Locks) -> None:
    pool.prepare(plan(), 1, lambda arena: None)
    assert pool.wait_prepared() and len(locks.held) == 1
    pool.close()
    assert not locks.held


def test_an_arena_nobody_could_be_told_of_is_given_back(pool: SlotPool, locks: Locks) -> None:
    """Else its addresses stay with the driver, which refuses whatever the kernel puts there next."""

    def no_agent(arena: Arena) -> None:
        raise OSError("gone")

    pool.prepare(plan(), 1, no_agent)
    assert not pool.wait_prepared()
    assert locks.locked == 1 and not locks.held
    pool.close()


def test_stopped_while_it_is_made_ready(pool: SlotPool, locks: Locks, monkeypatch: pytest.MonkeyPatch) -> None:
    at_work, told = threading.Event(), []

    def slow(arena: Arena, part: int = 0, parts: int = 1) -> None:
        at_work.set()
        while not pool._is_stopping:
            threading.Event().wait(0.001)

    monkeypatch.setattr(Arena, "fault_in", slow)
    pool.prepare(plan(), 1, told.append)
    at_work.wait()
    pool.stop()
    assert not pool.is_preparing and pool.arena is None and not told and not locks.locked
    pool.close()
