"""What one rank holds for others, and how it comes to hold it.

Owns:    which shards a rank copies, from the scheme and who sits where.
Not:     who protects whom (sets), copying (copies).
Holds:   a duty is done when its records are there, and they are written last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stepwell.levels import sets
from stepwell.levels.cache import Held
from stepwell.levels.copies import copy_shard
from stepwell.levels.peers import Peers
from stepwell.levels.spec import Pairs, Partner, Protection
from stepwell.store import files
from stepwell.store.commit import record_name
from stepwell.store.paths import RunPaths
from stepwell.types import CheckpointId, Owner


@dataclass(frozen=True)
class Duties:
    """Of one rank. copies: the ranks whose shards it holds a copy of."""

    copies: tuple[int, ...] = ()

    @classmethod
    def of(cls, protect: Protection, domains: Sequence[str], rank: int) -> Duties:
        """What the scheme asks of this rank."""
        holders: dict[int, tuple[int, ...]] = {}
        if isinstance(protect, Pairs):
            holders = sets.pairs(domains)
        elif isinstance(protect, Partner):
            holders = sets.ring(domains)
        return cls(tuple(owner for owner, by in sorted(holders.items()) if rank in by))

    def is_done(self, paths: RunPaths, id: CheckpointId) -> bool:
        """Whether all is held that is to be held of this checkpoint."""
        directory = paths.checkpoint(id)
        return all(files.exists(directory / record_name(Owner(rank))) for rank in self.copies)

    def do(self, paths: RunPaths, id: CheckpointId, run: str, peers: Peers) -> int | None:
        """Hold it. Returns the bytes fetched; None if some rank has no part yet. Raises OSError or DamagedError."""
        nbytes = 0
        for rank in self.copies:
            if files.exists(paths.checkpoint(id) / record_name(Owner(rank))):
                continue
            state = peers.state(rank, id)
            if state is None or state["held"] is None:
                return None
            held = state["held"]
            item = Held(rank, len(peers), held["digest"], held["nbytes"], held["suspect"], is_whole=True)
            nbytes += copy_shard(peers.peer(rank), paths, id, run, item).nbytes
        return nbytes
