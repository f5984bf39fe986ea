"""Slots for snapshots: how many there is memory for, which one is free, and making them ready in the background.

Owns:    the trainer's arena, its preparation thread, and who uses which slot.
Holds:   the newest complete slot is not claimed while another is free; the cap on host memory is kept; a machine
         without room gets fewer slots, then none (streamed saves), with the reason; never a bus error.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from stepwell.events import journal, run_events
from stepwell.handover.memory import FROZEN, HEADER_BYTES, PAGE, Arena, ArenaShape, available_bytes, whole_pages
from stepwell.storage.format.checksum import BLOCK_BYTES
from stepwell.training.loop.waits import LONG_SECONDS, too_long
from stepwell.training.snapshot.layout import Plan

_LEAST_SLACK, _MOST_SLACK = 1 / 64, 1.0
"""A slot is so much larger than needed. A state that outgrows it gets twice that the next time, as a list does."""
_SHRUNK = 4
_CHASED = 3
"""Arenas in a row that the state outgrew before they held a snapshot."""
_REST_SECONDS = 30.0
"""From a failed attempt to have memory to the next one, unless a save was asked for."""
_RESERVE = 16  # leave a sixteenth of what is available


class PageLocks(Protocol):
    """Page-locks arenas where there is a device to copy from."""

    def lock(self, arena: Arena) -> bool: ...

    def unlock(self, arena: Arena) -> None: ...


@dataclass
class Slot:
    """One slot's use. `sequence` is 0 while free; `plan` is the number of the plan whose header it holds; `is_over`:
    its snapshot is complete or void; `is_read`: the agent reads it, and says when it is done with it.
    """

    index: int
    sequence: int = 0
    newest: int = 0
    plan: int = -1
    is_read: bool = True
    is_over: bool = False


class SlotPool:
    """The arena of this trainer. Constructing only assigns; `prepare` takes the memory."""

    def __init__(self, *, slots: int, cap_bytes: int | None, spare_bytes: int = 0, pages: PageLocks,
                 log: journal.EventLog) -> None:  # fmt: skip
        self._wanted = slots
        self._spare_bytes = spare_bytes
        self._cap_bytes = cap_bytes
        self._pages = pages
        self._log = log
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._is_preparing = self._is_stopping = False
        self._slack, self._slot_bytes, self._outgrown = _LEAST_SLACK, 0, 0
        self.arena: Arena | None = None
        self.slots: list[Slot] = []
        self.frozen_sequence = 0
        self.frozen_header = b""
        self.is_streaming = False
        self.reason = ""
        self.refused = ""
        """Why there is no memory at all, not even to stream; empty if there is, or it was not tried yet."""
        self._rests_until = 0.0

    def fits(self, plan: Plan) -> bool:
        """Whether the present arena can hold snapshots of this plan.

        A frozen image is never overwritten by another one: the agent may still be writing it.
        """
        if self.is_streaming:
            return self.arena is not None and not plan.frozen_bytes
        return (
            self.arena is not None
            and (plan.frozen is None or self.frozen_header in (b"", plan.frozen.header))
            and plan.live.nbytes <= self.arena.shape.slot_bytes
            and plan.frozen_bytes <= self.arena.shape.frozen_bytes
        )

    def prepare(self, plan: Plan, generation: int, on_ready: Callable[[Arena], None]) -> None:
        """Allocate, fault in and page-lock in the background; `on_ready` is called from there."""
        self._note_growth(plan)
        old, self.arena, self.slots = self.arena, None, []
        self._is_preparing = True

        def work() -> None:
            arena = None
            try:
                arena = make()
            except Exception as error:  # told, and tried again at the next trigger; nobody may wait for ever
                self.refused = f"cannot allocate memory for snapshots: {type(error).__name__}: {error}"
                run_events.logger.error("%s", self.refused)
            with self._changed:
                if arena is not None:
                    self.refused, self._rests_until = "", 0.0
                else:
                    self.refused = self.refused or "there is no memory for snapshots"
                    self._rests_until = time.monotonic() + _REST_SECONDS
                self.arena = arena
                self.slots = [Slot(i) for i in range(arena.shape.slots)] if arena is not None else []
                self.frozen_sequence, self.frozen_header = 0, b""
                self._is_preparing = False
                self._changed.notify_all()

        def make() -> Arena | None:
            started = time.monotonic()
            if old is not None:
                self._drop(old)
            arena = None if self._is_stopping else self._allocate(plan, generation)
            if arena is None:
                return None
            try:
                _fault_in(arena)  # before it is locked: a driver that has to do it holds the device up for seconds
                if self._is_stopping:
                    self._drop(arena)
                    return None
                page_locked = self._pages.lock(arena)
                on_ready(arena)
            except BaseException:
                self._drop(arena)
                raise
            shape = arena.shape
            self._log.emit(
                run_events.Arena(
                    slots=0 if self.is_streaming else shape.slots,
                    slot_bytes=shape.slot_bytes,
                    frozen_bytes=shape.frozen_bytes,
                    seconds=time.monotonic() - started,
                    page_locked=page_locked,
                    reason=self.reason,
                )
            )
            return arena

        self._thread = threading.Thread(target=work, daemon=True, name="stepwell-arena")
        self._thread.start()

    def _note_growth(self, plan: Plan) -> None:
        if self._slot_bytes and plan.live.nbytes > self._slot_bytes:
            self._slack = min(_MOST_SLACK, 2 * self._slack)
            self._outgrown += 1
        elif _SHRUNK * plan.live.nbytes < self._slot_bytes:
            self._slack = _LEAST_SLACK

    @property
    def is_chased(self) -> bool:
        """Whether the state outgrows arenas before they are ready: who does not wait for one never has a snapshot."""
        return self._outgrown >= _CHASED

    def _allocate(self, plan: Plan, generation: int) -> Arena | None:
        """As many slots as there is room for; a two-chunk ring for streaming if not even one fits."""
        need = whole_pages(plan.live.nbytes + self._spare_bytes)
        sizes = [need + whole_pages(int(need * slack)) for slack in sorted({self._slack, _LEAST_SLACK}, reverse=True)]
        frozen = whole_pages(plan.frozen_bytes)
        room = available_bytes()
        room -= room // _RESERVE
        limit = room if self._cap_bytes is None else min(room, self._cap_bytes)
        why = "host_memory" if self._cap_bytes is not None and self._cap_bytes <= room else "free host memory"
        self.is_streaming = False
        tries = [(slots, size) for slots in range(self._wanted, 1, -1) for size in (*sizes, need)]
        for slots, size in (*tries, (1, need)):
            shape = ArenaShape(generation, slots, size, frozen)
            if shape.nbytes <= limit:
                full = slots == self._wanted
                self.reason = "" if full else f"{why} of {limit} bytes has room for only {_count(slots)}"
                self._slot_bytes = size
                try:
                    return Arena.allocate(shape)
                except OSError as error:
                    why = f"the kernel refused {shape.nbytes} bytes ({_reason(error)}), and {why}"
        self.is_streaming = True
        self.reason = (
            f"{why} of {limit} bytes has no room for a snapshot of {need + frozen}: saves stream and block training"
        )
        chunk = max(PAGE, min(BLOCK_BYTES, (limit - HEADER_BYTES) // 2 // PAGE * PAGE))
        try:
            return Arena.allocate(ArenaShape(generation, 2, chunk, 0))
        except OSError as error:
            self.refused = f"there is no memory for snapshots, not even for a streamed one ({_reason(error)}): {why}"
            return None

    @property
    def is_ready(self) -> bool:
        """Whether there is memory for snapshots."""
        return self.arena is not None and not self._is_preparing

    @property
    def is_preparing(self) -> bool:
        """Whether the preparation thread is at work."""
        return self._is_preparing

    @property
    def is_resting(self) -> bool:
        """There was no memory a moment ago."""
        return self.arena is None and time.monotonic() < self._rests_until

    def try_again(self) -> None:
        """A save was asked for: there may be memory now."""
        self._rests_until = 0.0

    def wait_prepared(self, seconds: float = LONG_SECONDS) -> bool:
        """Block until the preparation is over. False if it came to nothing: not even a few megabytes were free."""
        with self._changed:
            if not self._changed.wait_for(lambda: not self._is_preparing, seconds):
                raise too_long("memory for snapshots", seconds)
            return self.arena is not None

    def claim(self, sequence: int, *, is_read: bool, seconds: float = 0.0) -> Slot | None:
        """A slot that may be overwritten, the oldest first; None if all are busy for so long.

        What only stays in memory may be overwritten once a newer snapshot is complete: the agent never reads it
        while this process lives.
        """
        deadline = time.monotonic() + seconds
        with self._changed:
            while True:
                newest = max((slot.newest for slot in self.slots if slot.is_over), default=0)
                free = sorted(
                    (
                        slot
                        for slot in self.slots
                        if not slot.sequence or (not slot.is_read and slot.is_over and slot.newest < newest)
                    ),
                    key=lambda slot: slot.newest,
                )
                if free:
                    slot, self._outgrown = free[0], 0
                    slot.sequence = slot.newest = sequence
                    slot.is_read, slot.is_over = is_read, False
                    return slot
                left = deadline - time.monotonic()
                if left <= 0:
                    return None
                self._changed.wait(min(0.2, left))

    def complete(self, sequence: int) -> None:
        """All bytes and the verdict of a snapshot are in."""
        with self._changed:
            for slot in self.slots:
                if slot.sequence == sequence:
                    slot.is_over = True

    def release(self, sequence: int) -> None:
        """The agent is done with a snapshot, or it came to nothing."""
        with self._changed:
            for slot in self.slots:
                if slot.sequence == sequence:
                    slot.sequence = 0
                    self._changed.notify_all()

    def abandon(self, sequence: int) -> None:
        """A snapshot could not even be started: void for the agent, free for the next one."""
        for slot in self.slots:
            if slot.sequence == sequence and self.arena is not None:
                self.arena.set_verdict(slot.index, sequence, is_good=False)
                if not self.arena.is_complete(FROZEN, self.frozen_sequence):
                    self.frozen_sequence = 0  # it was to bring the frozen leaves too
        self.forget(sequence)
        self.release(sequence)

    def release_all(self) -> None:
        """There is no agent any more: nobody waits for a slot."""
        for slot in self.slots:
            self.release(slot.sequence)

    def forget(self, sequence: int) -> None:
        """A snapshot was voided: its slot holds nothing worth protecting (the agent still has to release it)."""
        for slot in self.slots:
            if slot.sequence == sequence:
                slot.newest, slot.is_over = 0, True

    def busy(self) -> int:
        """How many slots are in use."""
        return sum(1 for slot in self.slots if slot.sequence)

    def stop(self, seconds: float = LONG_SECONDS) -> bool:
        """No arena is needed any more: let one that is being made ready come to nothing, and wait for that. False if
        that takes longer.
        """
        self._is_stopping = True
        if self._thread is not None:
            self._thread.join(seconds)
            return not self._thread.is_alive()
        return True

    def close(self, seconds: float = LONG_SECONDS) -> None:
        """Give the memory back."""
        if not self.stop(seconds):
            run_events.logger.warning(
                "memory for snapshots is still being allocated, and stays until this process ends"
            )
            return
        if self.arena is not None:
            self._drop(self.arena)
            self.arena = None

    def _drop(self, arena: Arena) -> None:
        self._pages.unlock(arena)  # before the memory goes: the driver keeps page-locked memory by address
        arena.close()


def _fault_in(arena: Arena) -> None:
    """On a quarter of the cores, in the background of training."""
    parts = max(1, min(8, (os.cpu_count() or 1) // 4)) if arena.shape.nbytes > 1 << 30 else 1
    threads = [threading.Thread(target=arena.fault_in, args=(part, parts), daemon=True) for part in range(1, parts)]
    for thread in threads:
        thread.start()
    arena.fault_in(0, parts)
    for thread in threads:
        thread.join()


def _count(slots: int) -> str:
    return "one slot" if slots == 1 else f"{slots} slots"


def _reason(error: OSError) -> str:
    """Memory is a file that has no name: a limit on the size of files holds for it too."""
    return f"{error.strerror}: `ulimit -f`" if error.errno == errno.EFBIG else str(error.strerror)
