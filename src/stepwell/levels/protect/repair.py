"""Making a lost shard again from what the other nodes of its set hold.

Owns:    what a node tells of one checkpoint, reaching shards and parity on any node, and who is asked for what.
Not:     whether it can be done (inventory), computing and keeping it (parity).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from stepwell.errors import DamagedError, PeerError
from stepwell.levels import cached
from stepwell.levels.inventory import HeldNode, HeldParity, Inventory, Loss, Place
from stepwell.levels.protect.copies import Reader, fetch_record
from stepwell.levels.protect.parity import Shard, find_parity, rebuild, record_copy
from stepwell.levels.protect.protection import near_fill, near_shard
from stepwell.storage.format.checksum import document_digest
from stepwell.storage.format.parity_entry import Parity, parity_name
from stepwell.storage.format.record import FileEntry, Record
from stepwell.storage.store import files
from stepwell.storage.store.blocks import Fill
from stepwell.storage.store.paths import RunPaths
from stepwell.types import CheckpointId


def tell(paths: RunPaths, id: CheckpointId, run: str) -> HeldNode:
    """What this node holds of a checkpoint."""
    parity = []
    for name in files.list_names(paths.checkpoint(id)):
        if name.startswith("parity-") and name.endswith(".json"):
            with contextlib.suppress(DamagedError, ValueError):
                found = find_parity(paths, id, int(name[7:-5]))
                if found is not None and found.run == run:
                    digests = tuple(record.digest for record in found.records)
                    nbytes = len(found.dump())
                    parity.append(HeldParity(found.rank, found.members, found.losses, found.lengths, digests, nbytes))
    return HeldNode(cached.held(paths, id, run), parity)


@dataclass(frozen=True)
class RepairReach:
    """The way to what any node holds of one checkpoint. `peer`: who reads on a node, by its name."""

    paths: RunPaths
    id: CheckpointId
    run: str
    node: str
    peer: Callable[[str], Reader]

    def shard(self, node: str, item: cached.Held) -> Shard:
        """A rank's record, and the way to its files. Raises OSError or DamagedError."""
        if node == self.node:
            return near_shard(self.paths, self.id, item.rank)
        return *fetch_record(self.peer(node), self.id, self.run, item), self._fill(node)

    def parity(self, node: str, item: HeldParity) -> tuple[Parity, Fill]:
        """A member's parity. Raises OSError or DamagedError."""
        data = self.document(node, parity_name(item.rank), item.nbytes)
        return Parity.load(data, path=f"{self.id}/{parity_name(item.rank)}"), self._fill(node)

    def document(self, node: str, name: str, nbytes: int) -> bytes:
        """A small file. Raises OSError or DamagedError."""
        if node == self.node:
            return files.get(self.paths.checkpoint(self.id) / name)
        data = bytearray(nbytes)
        self.peer(node).read(self.id.directory, name, 0, nbytes, memoryview(data))
        return bytes(data)

    def _fill(self, node: str) -> Fill:
        if node == self.node:
            return near_fill(self.paths.checkpoint(self.id))
        peer = self.peer(node)

        def fill(file: FileEntry, start: int, buffer: memoryview) -> None:
            try:
                peer.read(self.id.directory, file.name, start, len(buffer), buffer)
            except PeerError as error:
                raise DamagedError(str(error), path=file.name) from error

        return fill


def remake(paths: RunPaths, id: CheckpointId, run: str, found: Inventory, loss: Loss, reach: RepairReach) -> None:
    """Hold a lost rank's shard on this node. On return it is durable.

    Raises OSError or DamagedError; its field `place` says what is not what it should be, if one thing is.
    """
    parity, lost = loss.parity, loss.lost
    shards, rows = {}, {}
    places: dict[str, Place] = {}
    for at, member in enumerate(parity.members):
        if at in lost:
            continue
        holders = found.holders(member)
        node = next(name for name in _nearest(holders, reach.node) if holders[name].digest == parity.digests[at])
        with _doubting(("shard", member, node)):
            shards[at] = reach.shard(node, holders[node])
        places |= {file.name: ("shard", member, node) for file in shards[at][1].files}
        keepers = found.parity_holders(parity, at)
        node = _nearest(keepers, reach.node)[0]
        with _doubting(("parity", member, node)):
            rows[at] = reach.parity(node, keepers[node])
        places[rows[at][0].file.name] = ("parity", member, node)
    document = next(iter(rows.values()))[0]
    reference = document.records[parity.members.index(loss.rank)]
    wanted = _record(found, loss, reference.nbytes, reach)
    try:
        rebuild(paths, wanted, document, lost, shards, rows)
    except DamagedError as error:
        raise DamagedError(str(error), place=places.get(str(error.fields.get("path")))) from error


@contextlib.contextmanager
def _doubting(place: Place) -> Iterator[None]:
    """What cannot be had from there is as good as lost there."""
    try:
        yield
    except (OSError, DamagedError) as error:
        raise DamagedError(str(error), place=place) from error


def _record(found: Inventory, loss: Loss, nbytes: int, reach: RepairReach) -> tuple[bytes, Record]:
    """The lost rank's record, of which every node of its set has a copy."""
    parity, errors = loss.parity, []
    expected = parity.digests[parity.members.index(loss.rank)]
    for at in range(len(parity.members)):
        for node in found.parity_holders(parity, at):
            if parity.members[at] == loss.rank:
                continue
            try:
                data = reach.document(node, record_copy(loss.rank), nbytes)
                if document_digest(data) == expected:
                    return data, Record.load(data, path=record_copy(loss.rank))
                errors.append(f"{node}: another record")
            except (OSError, DamagedError) as error:
                errors.append(f"{node}: {error}")
    raise DamagedError(f"{reach.id}: no copy of the record of rank {loss.rank}: {'; '.join(errors)}")


def _nearest(holders: dict[str, cached.Held] | dict[str, HeldParity], node: str) -> list[str]:
    return sorted(holders, key=lambda name: (name != node, name))
