"""Snapshots the agent was told of, in the order they were taken.

Owns:    which of them is complete, which comes next, and which is given up for a newer one.
Holds:   in order; a snapshot whose write failed is given up only when a newer one is complete, or waits for the only
         slot; writing may begin before a snapshot is complete, if no complete one waits, and is for nothing if it never
         becomes so; one that is not wanted on disk is kept for a successor until a newer one is complete.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

from stepwell.agent.pending import Pending, Stage
from stepwell.types import CheckpointId


def _sequence(item: Pending) -> int:
    return item.sequence


class PendingQueue:
    """Snapshots in order of their sequence. Used under the agent's lock."""

    def __init__(self) -> None:
        self.items: list[Pending] = []
        self.is_room_wanted = False
        self._complete: dict[tuple[int, int], Pending] = {}
        """The last complete snapshot seen in each slot of each arena, written or not."""

    def add(self, pending: Pending) -> None:
        """A snapshot was announced. What was still being filled in its slot is gone with that."""
        self._keep(
            lambda item: (
                item.sequence != pending.sequence
                and not (item.slot == pending.slot and item.arena is pending.arena and item.is_unfinished)
            )
        )
        self.items.append(pending)
        self.is_room_wanted = False
        self.items.sort(key=lambda item: item.sequence)

    def _keep(self, test: Callable[[Pending], bool]) -> None:
        kept = [item for item in self.items if test(item)]
        for item in self.items:
            if item not in kept and not item.is_over:
                item.ended = Stage.DROPPED
        self.items = kept

    def collect(self, busy: Pending | None) -> list[Pending]:
        """Remove what is void, done or given up; return it, so that its slots can be released.

        `busy` is being written right now: its slot must not be filled anew under the writer.
        """
        complete = self._note_complete()
        out = []
        for item in list(self.items):
            in_the_way = self.is_room_wanted and item.arena.shape.slots == 1
            has_newer = any(other.sequence > item.sequence for other in complete)
            given_up = item.failures > 0 and item.is_complete and (has_newer or in_the_way)
            is_used_up = item.is_coded if item.is_symbols else has_newer or in_the_way
            is_over = item.is_void or given_up or (not item.is_wanted and is_used_up)
            is_written = item.stage is Stage.WRITTEN  # the leader may be about to commit it
            if not item.is_held and (item.is_over or (item is not busy and not is_written and is_over)):
                self.items.remove(item)
                out.append(item)
        return out

    def _note_complete(self) -> list[Pending]:
        complete = [item for item in self.items if item.is_complete and not item.is_symbols]
        self._complete.update({(item.arena.shape.generation, item.slot): item for item in complete})
        return complete

    def complete(self) -> list[Pending]:
        """What a successor may be offered: the snapshots whose bytes are all in memory still, the newest first."""
        self._note_complete()
        whole = [item for item in self._complete.values() if item.is_complete]  # others: their slot was filled again
        return sorted(whole, key=lambda item: -item.sequence)

    def next_due(self, now: float | None = None) -> Pending | None:
        """The oldest complete snapshot whose time has come; if there is none complete, one whose bytes arrive."""
        now = time.monotonic() if now is None else now
        waiting = [item for item in self.items if item.is_wanted and item.stage in (Stage.ARRIVING, Stage.COMPLETE)]
        for item in waiting:
            if item.is_complete:
                return item if item.not_before <= now else None
        return next((item for item in waiting if item.has_begun), None)

    def written(self) -> list[Pending]:
        """Those whose part is durable here, while other ranks still write theirs."""
        return [item for item in self.items if item.stage is Stage.WRITTEN]

    def is_waiting(self) -> bool:
        """Whether something is still to be written, now or later."""
        return any(item.is_wanted and not item.is_over for item in self.items)

    def is_stuck(self) -> bool:
        """Whether a newer one has no slot, and one that failed may keep its own for long."""
        return self.is_room_wanted and any(item.failures and not item.is_over for item in self.items)

    def has_symbols(self) -> bool:
        """Whether something that came coded is still to go into its chain."""
        return any(item.is_symbols and item.is_complete and not item.is_coded for item in self.items)

    def next_delta(self) -> Pending | None:
        """What is to go into a chain next: of what came coded the oldest, else the newest one."""
        ready = [item for item in self.items if item.is_delta and item.is_complete]
        if symbols := [item for item in ready if item.is_symbols and not item.is_coded]:
            return min(symbols, key=_sequence)
        newest = max((item for item in ready if not item.is_symbols), key=_sequence, default=None)
        return None if newest is None or newest.is_coded else newest

    def unused(self, generations: Iterable[int], busy: Pending | None) -> list[int]:
        """Arenas that nobody needs any more: all but the newest, once their snapshots are written."""
        used = {item.arena.shape.generation for item in (*self.items, *([busy] if busy else []))}
        out = [generation for generation in sorted(generations)[:-1] if generation not in used]
        self._complete = {key: item for key, item in self._complete.items() if key[0] not in out}
        return out

    def has_incomplete(self) -> bool:
        """Whether something that is to be written may still become complete."""
        wanted = [item for item in self.items if item.is_wanted or item.is_delta]
        return any(not item.is_over and item.is_unfinished for item in wanted)

    def drop_incomplete(self) -> list[Pending]:
        """The trainer is dead: what is not complete never will be. Returns it."""
        gone = [item for item in self.items if item.is_unfinished]
        self._keep(lambda item: not item.is_unfinished)
        return gone

    def drop_unwanted(self) -> None:
        """The run was closed, its last step saved: what was only kept in memory is not needed any more."""
        self._keep(lambda item: item.is_wanted or item.is_symbols)

    def want_newest(self) -> None:
        """The trainer is dead: if the newest complete snapshot was only kept in memory, it is to be written now."""
        self._want(self.complete()[:1])
        self.drop_unwanted()

    def want(self, id: CheckpointId) -> None:
        """A successor goes on from this snapshot, perhaps an older one than the newest here: it is to be written."""
        self._want([item for item in self.complete() if item.id == id])

    def _want(self, chosen: Sequence[Pending]) -> None:
        for item in chosen:
            if not item.is_wanted and not item.is_over:
                item.is_wanted = True
                if item not in self.items:
                    item.ended = None
                    self.items.append(item)
                    self.items.sort(key=lambda item: item.sequence)
