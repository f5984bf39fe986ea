"""What lingering agents on this machine still hold of the run in memory.

Owns:    adopting this rank's agent, looking into those of the other ranks, and the arenas they hand out.
Holds:   an arena is read through its descriptor, as if it were a file; it is let go of when the restore is over.
"""

from __future__ import annotations

import os

from stepwell.handover.agent_address import find_ranks
from stepwell.handover.client import AgentClient
from stepwell.handover.find_agents import find_orphan, peek
from stepwell.handover.memory import Arena, ArenaShape
from stepwell.handover.protocol import Offer
from stepwell.restore.byte_sources import BlockSource, MemorySource
from stepwell.restore.whole import Part
from stepwell.storage.format.record import FileEntry, Record
from stepwell.types import CheckpointId

Held = dict[CheckpointId, dict[int, Part]]
"""Of each snapshot that is complete in memory, the parts that can be read here, by rank."""


class Holdings:
    """Snapshots in the memory of agents whose trainers are gone."""

    def __init__(self) -> None:
        self.held: Held = {}
        self._arenas: list[Arena] = []

    @classmethod
    def find(cls, where: str, client: AgentClient, rank: int) -> Holdings:
        """Adopt the agent of a dead trainer of this rank, if there is one, or has been in a try before this one."""
        holdings = cls()
        if client.offer is None:
            found = find_orphan(where, rank=rank)
            if found is not None:
                client.adopt(*found)
        if client.offer is not None:
            offer, fds = client.offer
            holdings._add(offer, [os.dup(fd) for fd in fds])
        for other in find_ranks(where):
            seen = peek(where, other) if other != rank else None
            if seen is not None:
                holdings._add(*seen)
        return holdings

    def _add(self, offer: Offer, fds: list[int]) -> None:
        if not fds or offer.arena is None:
            return
        arena = Arena.attach(fds[0], ArenaShape(**vars(offer.arena)))
        self._arenas.append(arena)
        for item in offer.snapshots:
            record = Record.load(item.record.encode(), path="arena")
            part = _part(arena, record, item.slot, item.frozen)
            self.held.setdefault(record.id, {})[record.owner.rank] = part

    def close(self) -> None:
        """Let go of the arenas; the agents free them when their snapshots are durable."""
        for arena in self._arenas:
            arena.close()


def _part(arena: Arena, record: Record, slot: int, frozen: int) -> Part:
    def open_source(file: FileEntry) -> BlockSource:
        index = frozen if file is record.files[-1] and len(record.files) > 1 else slot
        return MemorySource(arena.fd, arena.shape.start(index), file.nbytes, file.name)

    return Part(record, open_source)
