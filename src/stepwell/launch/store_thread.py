"""The thread through which an agent lives in the store: it beats, looks at the others, and changes the table.

Owns:    the connection to the store, the heartbeat, the last table that was seen, and the end of workers that do not
         end by themselves.
Not:     what the changes are (table), what to wait for (rendezvous).
Holds:   all talk to the store is in this one thread, so that a store that does not answer holds no other: whoever
         waits for it is told StoreLostError. The table changes by compare-and-set only. An agent looks at the next few
         in the ring and declares them dead; about itself it believes the table.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from stepwell.errors import StepwellError
from stepwell.events.run_events import logger
from stepwell.launch import slot_table as change
from stepwell.launch.conf import Conf
from stepwell.launch.pulse import Pulse
from stepwell.launch.slot_table import SlotTable, decode
from stepwell.launch.workers import kill_workers

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

Change = Callable[[SlotTable], SlotTable]

_TICKS: Final = 4
"""Looks in one interval of heartbeats."""
_WATCHED: Final = 3
"""How many others an agent looks after; the dead are skipped, so that a whole row of dead ones is found too."""
_SLICE_SECONDS: Final = 0.5


class StoreLostError(StepwellError):
    """The store is gone, or does not answer."""


@dataclass
class _Wish:
    change: Change
    result: SlotTable | None = None


class StoreThread:
    """One agent's end of the store. Constructing only assigns."""

    def __init__(self, job: str, empty: SlotTable, conf: Conf, notice: str | None) -> None:
        self._job = job
        self._empty = empty
        self._conf = conf
        self._notice = notice
        self._store: Store | None = None
        self._thread: threading.Thread | None = None
        self._lock = threading.Condition()
        self._bell = threading.Event()
        self._wishes: list[_Wish] = []
        self._is_closed = False
        self._problem = ""
        self._turns = 0
        self._table = empty
        self._agent = ""
        self._beats = 0
        self._beaten = -math.inf
        self._round: tuple[int, int] | None = None
        self._broken: float | None = None
        self._others = Pulse(2 * conf.interval / _TICKS)
        self._own = Pulse(_SLICE_SECONDS)

    def start(self, store: Store) -> None:
        """Begin to live in this store."""
        self._store = store
        self._thread = threading.Thread(target=self._run, daemon=True, name="stepwell-keeper")
        self._thread.start()

    def close(self) -> None:
        """End the thread, unless it is stuck. May be called twice."""
        self._is_closed = True
        self._bell.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_SLICE_SECONDS)

    def live_as(self, agent: str) -> None:
        """Beat under this name from now on. It may enter the table once a change was asked for after this."""
        with self._lock:
            self._agent, self._beaten = agent, -math.inf

    def begin_round(self, generation: int, version: int) -> None:
        """The workers that are started now belong to this generation, which began with this version of the table."""
        with self._lock:
            self._round, self._broken = (generation, version), None

    def end_round(self) -> int:
        """There are no workers any more. Returns the generation they belonged to, 0 if there were none."""
        with self._lock:
            before, self._round, self._broken = self._round, None, None
            return 0 if before is None else before[0]

    def ask(self, wish: Change) -> SlotTable:
        """Change the table, from what it is now, and return what it is then. Waits for the store; StoreLostError."""
        mine = _Wish(wish)
        with self._lock:
            self._wishes.append(mine)
            self._bell.set()
            self._wait(lambda: mine.result is not None)
        assert mine.result is not None
        return mine.result

    def next_look(self) -> SlotTable:
        """Wait for the next look at the table; StoreLostError."""
        with self._lock:
            turns = self._turns
            self._wait(lambda: self._turns > turns)
            return self._table

    def is_broken(self) -> bool:
        """Whether the running workers have to end, without waiting for anything. StoreLostError."""
        with self._lock:
            if self._problem:
                raise StoreLostError(self._problem)
            # Our own silence too is counted in looks: a process that was frozen is not a store that is gone.
            if self._own.look({"turns": self._turns}, time.monotonic())["turns"] > self._conf.store_seconds:
                raise StoreLostError(f"the store has not answered for {self._conf.store_seconds:g} s")
            return self._broken is not None

    @property
    def table(self) -> SlotTable:
        """As it was seen last."""
        with self._lock:
            return self._table

    def _wait(self, condition: Callable[[], bool]) -> None:
        """With the lock held. Counts slices, so that being frozen is not taken for a store that is gone."""
        waited = 0.0
        while not condition():
            if self._problem:
                raise StoreLostError(self._problem)
            if waited > self._conf.store_seconds:
                raise StoreLostError(f"the store has not answered for {self._conf.store_seconds:g} s")
            if not self._lock.wait(_SLICE_SECONDS):
                waited += _SLICE_SECONDS

    # The thread

    def _run(self) -> None:
        try:
            while not self._is_closed:
                self._turn()
                self._bell.wait(self._conf.interval / _TICKS)
                self._bell.clear()
        except Exception as error:  # whatever it is, it goes to whoever waits; torch raises many kinds
            with self._lock:
                self._problem = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
                self._lock.notify_all()

    def _turn(self) -> None:
        assert self._store is not None
        store, now = self._store, time.monotonic()
        with self._lock:
            agent, wishes = self._agent, self._wishes
            self._wishes = []
            is_due = bool(agent) and now - self._beaten >= self._conf.interval
            if is_due:
                self._beats, self._beaten = self._beats + 1, now
        if is_due:
            store.set(self._beat_key(agent), str(self._beats))  # before it may stand in the table
        seen = self._look_after(self._read(), agent, now)
        if self._notice and os.path.exists(self._notice):
            seen = self._change(lambda table: change.tell_to_leave(table, "a notice"))
        done = [(wish, self._change(wish.change)) for wish in wishes]
        seen = done[-1][1] if done else seen
        with self._lock:
            for wish, result in done:
                wish.result = result
            self._table = seen
            self._turns += 1
            self._judge(seen, now)
            self._lock.notify_all()

    def _look_after(self, table: SlotTable, agent: str, now: float) -> SlotTable:
        """Declare dead who is silent."""
        assert self._store is not None
        ring = table.watched()
        if agent in ring:
            here = ring.index(agent)
            ring = (ring[here + 1 :] + ring[:here])[:_WATCHED]
        beats = self._store.multi_get([self._beat_key(name) for name in ring]) if ring else []
        silent = self._others.look(dict(zip(ring, beats, strict=True)), now)
        dead = {name for name, seconds in silent.items() if seconds >= self._conf.dead_seconds}
        return self._change(lambda before: change.bury(before, dead, self._conf.restarts)) if dead else table

    def _judge(self, table: SlotTable, now: float) -> None:
        """With the lock held: whether our round still holds. Workers that outlive it by too long are killed.

        They may hang in C, in a collective whose partner is gone, and see no SIGTERM; torchrun would wait for 30 s.
        """
        if self._round is None or table.version < self._round[1]:
            return
        holds = table.is_running and table.generation == self._round[0] and table.seat_of(self._agent) is not None
        if holds or (table.over is not None and table.over.code == 0):
            return
        if self._broken is None:
            self._broken = now
        if now - self._broken > self._conf.stop_seconds and (killed := kill_workers(self._job)):
            logger.info("killed %d workers that did not end within %g s", killed, self._conf.stop_seconds)

    # The store

    def _read(self) -> SlotTable:
        assert self._store is not None
        # A read of a name that is not there waits for it: so the first one who comes writes an empty table.
        return decode(self._store.compare_set(self._table_key, "", self._empty.encode()))

    def _change(self, wish: Change) -> SlotTable:
        assert self._store is not None
        before = self._read()
        while (after := wish(before)) != before:
            # Version and writer make every value unique, so that what comes back tells whose change it was.
            after = replace(after, version=before.version + 1, writer=self._agent)
            found = decode(self._store.compare_set(self._table_key, before.encode(), after.encode()))
            if found == after:
                return after
            before = found
        return before

    @property
    def _table_key(self) -> str:
        return f"stepwell/{self._job}/slots"

    def _beat_key(self, agent: str) -> str:
        return f"stepwell/{self._job}/beat/{agent}"
