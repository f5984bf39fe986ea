"""Snapshots the agent was told of, in the order they were taken.

Owns:    which of them is complete, which comes next, and which is given up for a newer one.
Holds:   in order; a snapshot whose write failed is given up only when a newer one is complete, or waits for the only
         slot; nothing incomplete is ever handed on.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from stepwell.arena.memory import FROZEN, Arena
from stepwell.format.record import LeafEntry, Record
from stepwell.types import CheckpointId, Owner


@dataclass(frozen=True)
class Layout:
    """The part of a record that stays the same from snapshot to snapshot."""

    number: int
    nbytes: int
    frozen_bytes: int
    leaves: tuple[LeafEntry, ...]
    versions: dict[str, str]

    @classmethod
    def from_message(cls, message: dict[str, Any]) -> Layout:
        """As the trainer sent it."""
        leaves = tuple(_leaf(**leaf) for leaf in message["leaves"])
        return cls(message["id"], message["nbytes"], message["frozen_bytes"], leaves, message["versions"])


def _leaf(**fields: Any) -> LeafEntry:
    values: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()}
    return LeafEntry(**values)


@dataclass
class Pending:
    """One snapshot on its way. `meta` is the trainer's begin message."""

    run: str
    id: CheckpointId
    owner: Owner
    sequence: int
    slot: int
    arena: Arena
    layout: Layout
    meta: dict[str, Any]
    failures: int = 0
    not_before: float = 0.0
    record: Record | None = None
    is_done: bool = False

    @property
    def is_complete(self) -> bool:
        """All bytes and the guard's verdict are in memory, the frozen image included."""
        frozen: int = self.meta["frozen"]
        return self.arena.is_complete(self.slot, self.sequence) and (
            not frozen or self.arena.is_complete(FROZEN, frozen)
        )

    @property
    def is_void(self) -> bool:
        """The guard threw it away."""
        return self.arena.is_void(self.slot, self.sequence)

    def suspect(self) -> str | None:
        """Name of the first non-finite leaf, if any."""
        found = self.arena.suspects(self.slot)
        if not found.leaves:
            return None
        name = self.layout.leaves[found.first].name if found.first < len(self.layout.leaves) else "?"
        return f"{found.leaves} non-finite, first {name}"


class PendingQueue:
    """Snapshots in order of their sequence. Used under the agent's lock."""

    def __init__(self) -> None:
        self.items: list[Pending] = []
        self.newest_complete: Pending | None = None
        self.is_room_wanted = False

    def add(self, pending: Pending) -> None:
        """A snapshot was announced. What was still being filled in its slot is gone with that."""
        self.items = [
            item
            for item in self.items
            if item.sequence != pending.sequence
            and not (item.slot == pending.slot and item.arena is pending.arena and not item.is_complete)
        ]
        self.items.append(pending)
        self.is_room_wanted = False
        self.items.sort(key=lambda item: item.sequence)

    def collect(self, busy: Pending | None) -> list[Pending]:
        """Remove what is void, done or given up; return it, so that its slots can be released.

        `busy` is being written right now: its slot must not be filled anew under the writer.
        """
        complete = [item for item in self.items if not item.is_done and item.is_complete]
        if complete:
            self.newest_complete = complete[-1]
        out = []
        for item in list(self.items):
            in_the_way = self.is_room_wanted and item.arena.shape.slots == 1
            has_newer = any(other.sequence > item.sequence for other in complete)
            given_up = item.failures > 0 and (has_newer or in_the_way)
            if item.is_done or (item is not busy and (item.is_void or given_up)):
                self.items.remove(item)
                out.append(item)
        return out

    def next_due(self, now: float | None = None) -> Pending | None:
        """The oldest complete snapshot whose time has come."""
        now = time.monotonic() if now is None else now
        for item in self.items:
            if not item.is_done and item.is_complete:
                return item if item.not_before <= now else None
        return None

    def unused(self, generations: Iterable[int]) -> list[int]:
        """Arenas that nobody needs any more: all but the newest, once their snapshots are written."""
        used = {item.arena.shape.generation for item in self.items}
        out = [generation for generation in sorted(generations)[:-1] if generation not in used]
        if self.newest_complete is not None and self.newest_complete.arena.shape.generation in out:
            self.newest_complete = None
        return out

    def has_incomplete(self) -> bool:
        """Whether something may still become complete."""
        return any(not item.is_done and not item.is_complete for item in self.items)

    def drop_incomplete(self) -> None:
        """The trainer is dead: what is not complete never will be."""
        self.items = [item for item in self.items if item.is_complete]
