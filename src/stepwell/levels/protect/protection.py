"""What one rank holds for others, and how it comes to hold it.

Owns:    which shards a rank copies or has parity of, from the scheme and who sits where.
Not:     who protects whom (sets), copying (copies), parity (parity).
Holds:   a duty is done when its documents are there, and they are written last.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepwell.errors import DamagedError
from stepwell.levels.cached import Held
from stepwell.levels.level_spec import Pairs, Partner, Protection, ReedSolomon, Single
from stepwell.levels.peers.connections import Peers
from stepwell.levels.protect import sets
from stepwell.levels.protect.copies import Reader, copy_shard, fetch_record
from stepwell.levels.protect.parity import Shard, find_parity, keep_parity
from stepwell.storage.format.record import FileEntry, Record
from stepwell.storage.store import assemble, files
from stepwell.storage.store.blocks import Fill, fill_from
from stepwell.storage.store.commit import record_name
from stepwell.storage.store.paths import RunPaths
from stepwell.types import CheckpointId, Owner


@dataclass(frozen=True)
class Duties:
    """Of one rank.

    copies:   the ranks whose shards it holds a copy of
    members:  the set that it holds parity for, itself among them; `losses` of them may be lost
    why_not:  why nobody holds anything for this rank
    """

    rank: int
    copies: tuple[int, ...] = ()
    members: tuple[int, ...] = ()
    losses: int = 0
    why_not: str | None = None

    @classmethod
    def of(cls, protect: Protection, domains: Sequence[str], rank: int) -> Duties:
        """What the scheme asks of this rank."""
        alone = "too many ranks share its node, or what fails with it: there is nobody left to hold its shard"
        if isinstance(protect, Pairs | Partner):
            holders = sets.pairs(domains) if isinstance(protect, Pairs) else sets.ring(domains)
            copies = tuple(owner for owner, by in sorted(holders.items()) if rank in by)
            return cls(rank, copies=copies, why_not=None if holders[rank] else alone)
        if isinstance(protect, Single):
            return cls(rank)
        losses = protect.m if isinstance(protect, ReedSolomon) else 1
        made, unprotected = sets.make_sets(domains, protect.n)
        if rank in unprotected:
            return cls(rank, why_not=alone)
        members = next(members for members in made if rank in members)
        return cls(rank, members=members, losses=sets.losses_allowed(len(members), losses))

    def is_done(self, paths: RunPaths, id: CheckpointId) -> bool:
        """Whether all is held that is to be held of this checkpoint."""
        with contextlib.suppress(DamagedError):  # then it is made again
            if not all(assemble.find_record(paths, id, Owner(rank)) for rank in self.copies):
                return False
            found = find_parity(paths, id, self.rank) if self.members else None
            return not self.members or (found is not None and found.members == self.members)
        return False

    def do(self, paths: RunPaths, id: CheckpointId, run: str, peers: Peers, shared: Reader | None = None) -> int | None:
        """Hold it. Returns the bytes written; None if some rank has no part yet. Raises OSError or DamagedError.

        shared:  the way to parts that lie in the shared place: these need no copy
        """
        if self.is_done(paths, id):
            return 0
        others = self.copies or tuple(member for member in self.members if member != self.rank)
        found: dict[int, Held] = {}
        away: set[int] = set()
        for rank in others:
            state = peers.state(rank, id)
            if state is None or state["held"] is None:
                return None
            found[rank] = _held(rank, len(peers), state["held"])
            away |= {rank} if state["held"].get("is_shared") else set()
        if self.copies:
            near = {rank: item for rank, item in found.items() if rank not in away}
            return sum(copy_shard(peers.peer(rank), paths, id, run, item).nbytes for rank, item in near.items())
        shards = {
            rank: _far(shared if shared is not None and rank in away else peers.peer(rank), id, run, item)
            for rank, item in found.items()
        }
        return keep_parity(paths, id, self.rank, self.losses, shards | {self.rank: near_shard(paths, id, self.rank)})


def _held(rank: int, world_size: int, held: dict[str, Any]) -> Held:
    return Held(rank, world_size, held["digest"], held["nbytes"], held["suspect"], is_whole=True)


def _far(peer: Reader, id: CheckpointId, run: str, item: Held) -> Shard:
    def fill(file: FileEntry, start: int, buffer: memoryview) -> None:
        peer.read(id.directory, file.name, start, len(buffer), buffer)

    return *fetch_record(peer, id, run, item), fill


def near_shard(paths: RunPaths, id: CheckpointId, rank: int) -> Shard:
    """A shard in this node's own cache. Raises DamagedError."""
    directory = paths.checkpoint(id)
    path = directory / record_name(Owner(rank))
    data = files.get(path)
    return data, Record.load(data, path=str(path)), near_fill(directory)


def near_fill(directory: Any) -> Fill:
    """Reads files of one directory of this node."""
    assert isinstance(directory, Path)

    def fill(file: FileEntry, start: int, buffer: memoryview) -> None:
        place = directory / file.name
        with open(files.open_regular(place), "rb", buffering=0) as source:
            fill_from(source, str(place))(file, start, buffer)

    return fill
