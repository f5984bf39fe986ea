"""What the caches of all nodes hold of the run, and the way to it: restore by inventory.

Owns:    meeting the other nodes (who sits where, the secret, this rank's socket), telling and hearing what is held,
         for each shard of a chosen checkpoint the nearest place to read it from, and making again what lies nowhere.
Not:     which checkpoint is tried (reopen), serving (agent.door), verified reading (restore).
Holds:   found by content: ranks may come back on other nodes, in any order, or on nodes that hold nothing. What is of
         another history is not looked at. A node that does not answer is a source that fails, never the end. What one
         rank finds damaged no rank reads again.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from stepwell.errors import ConfigError, DamagedError, PeerError, StepwellError, VoidError
from stepwell.events.journal import EventLog
from stepwell.events.level_events import CacheFailing, CacheMade, LevelsChosen
from stepwell.handover.client import AgentClient
from stepwell.handover.protocol import Serve
from stepwell.levels import cached, first_level
from stepwell.levels.assignments import Orders, Seat, open_cache, run_cache
from stepwell.levels.inventory import HeldNode, Inventory, Loss, Place, gather
from stepwell.levels.level_spec import Levels, choose_protection
from stepwell.levels.node_map import find_sittings
from stepwell.levels.peers.fetch import Peer, PeerSource
from stepwell.levels.peers.server import listen
from stepwell.levels.peers.tls import NAME, client_context, server_context
from stepwell.levels.protect.copies import Reader
from stepwell.levels.protect.discard import mend
from stepwell.levels.protect.effective_scheme import compare
from stepwell.levels.protect.repair import RepairReach, remake, tell
from stepwell.levels.spilled_parts import SHARED, SharedReader
from stepwell.ranks.groups.consent import each, lead
from stepwell.ranks.groups.group import Group
from stepwell.ranks.line.line_meeting import own_address
from stepwell.ranks.wire.secret import derive
from stepwell.restore.byte_sources import BlockSource, FileSource
from stepwell.restore.from_disk import open_file
from stepwell.restore.whole import Part
from stepwell.storage.format.record import FileEntry, Record
from stepwell.storage.store import files
from stepwell.storage.store.assemble import check_copies
from stepwell.storage.store.lineage import History
from stepwell.storage.store.mounts import free_bytes, mount_of
from stepwell.storage.store.node_id import node_id
from stepwell.storage.store.paths import RunPaths
from stepwell.types import CheckpointId

_STEPS_TOLD: Final = 16
"""Of a node's cache, the newest."""
_SECONDS: Final = 30.0
_MOST_TRIES: Final = 8


class Caches:
    """Of one run, as one rank sees them. `meet`, `share` and `complete` are collective.

    shared:  the run's own directory, where the parts of nodes lie that could not hold them
    key:     the run's, on all ranks the same; it has not come over the group. Empty where there is one rank
    """

    def __init__(self, levels: Levels, run: str, shared: RunPaths, group: Group, log: EventLog, key: bytes) -> None:
        self._levels, self._run, self._shared, self._group, self._log = levels, run, shared, group, log
        self._key = key
        self._paths = run_cache(levels.node.path, run, group.rank)
        self._secret = ""
        self._seats: list[Seat] = []
        self.place = ""
        """The directory that all nodes gave; empty if they gave different ones."""
        self._socket: socket.socket | None = None
        self._peers: dict[str, Peer] = {}
        self._found: dict[CheckpointId, Inventory] = {}
        self._trouble: dict[str, str] = {}
        self._about: CheckpointId | None = None
        self._doubted: set[Place] = set()
        self._opened: dict[str, Place] = {}

    @property
    def _node(self) -> str:
        return self._seats[self._group.rank].node

    @property
    def _is_first(self) -> bool:
        """Of the ranks of a node, which share a cache, one says what lies there."""
        return all(seat.node != self._node for seat in self._seats[: self._group.rank])

    def meet(self, client: AgentClient) -> None:
        """Learn who sits where, and let this rank's agent serve the others, once. Collective. Raises ConfigError."""
        if self._seats:
            return
        group, node = self._group, self._levels.node
        start = lead(group, "the number of this start", lambda: os.urandom(16).hex())
        self._secret = derive(self._key or os.urandom(32), "levels", f"{self._run}:{start}").hex()
        mine: list[Any] = []
        trouble: list[OSError] = []
        missing: list[str] = []

        def prepare() -> None:
            address = node.address or os.environ.get("STEPWELL_ADDRESS") or own_address(is_one_node=group.nodes == 1)
            missing.extend(_missing(Path(node.path).absolute()))
            try:
                open_cache(self._paths)
                node_id(Path(node.path))
                trouble.extend(_why_not_writable(self._paths, group.rank))
                server_context(node.tls)  # the agent makes its own: this is where somebody reads what is wrong
                self._socket = None if group.size == 1 else listen((address, 0))
            except OSError as error:
                raise ConfigError(
                    f"the cache of this node, {node.path}, or the address {address} cannot be used: {error}; "
                    "give Node() another path or address",
                    path=str(node.path),
                ) from error
            port = 0 if self._socket is None else self._socket.getsockname()[1]
            mine.extend([address, port, str(Path(node.path).absolute()), missing])

        each(group, "the cache of each node", prepare)
        for error in trouble:
            self._log.emit(CacheFailing(path=str(Path(node.path).absolute()), error=str(error)))
        sittings = find_sittings(group.all_gather, group.rank, Path(node.path), node.domain, self._log.emit)
        everywhere = group.all_gather(mine, "who sits where")
        where = zip(sittings, everywhere, strict=True)
        self._seats = [Seat(sitting.node, sitting.domain, host, port) for sitting, (host, port, *_) in where]
        self.place = everywhere[0][2] if len({told[2] for told in everywhere}) == 1 else ""
        self._tell_made([told[3] for told in everywhere])
        if self._socket is not None:
            client.serve(Serve(str(self._paths.root), self._run, self._secret, node.tls), self._socket.fileno())

    def _tell_made(self, missing: Sequence[Sequence[str]]) -> None:
        """The first rank of each node: its cache was made. A disk that is not mounted would fill that of the system."""
        here = [rank for rank, seat in enumerate(self._seats) if seat.node == self._node]
        found = sorted(path for rank in here for path in missing[rank])
        if found and here[0] == self._group.rank:
            path = Path(self._levels.node.path).absolute()
            mount, kind = mount_of(path)
            if mount == "/" or found[0] != str(path):  # one in a file system of its own is as it should be
                told = CacheMade(path=str(path), missing=found[0], mount=mount, file_system=kind,
                                 free_bytes=free_bytes(path))  # fmt: skip
                self._log.emit(told)

    def share(self) -> None:
        """Tell what this node holds, and hear what the others do. Collective."""
        told = self._tell(self._paths) if self._is_first else {}
        beside = self._tell(self._shared) if self._group.is_leader else {}
        everywhere = self._group.all_gather([told, beside], "what the caches hold")
        found = [(self._seats[rank].node, steps) for rank, (steps, _) in enumerate(everywhere) if steps]
        self._found = gather([*found, (SHARED, everywhere[0][1])])

    def _tell(self, paths: RunPaths) -> dict[str, Any]:
        """Of the newest checkpoints there, those that the shared place has no manifest of."""
        newest = cached.steps(paths)[:_STEPS_TOLD]
        if paths is self._shared:
            newest = [id for id in newest if not files.exists(paths.manifest(id))]
        return {id.directory: tell(paths, id, self._run).dump() for id in newest}

    def whole(self, history: History) -> dict[CheckpointId, bool]:
        """The checkpoints of which every part can be had from some cache, and whether one of these is suspect."""
        live = {id: found for id, found in self._found.items() if history.is_live(id)}
        return {id: found.is_suspect for id, found in live.items() if found.losses() is not None}

    def complete(self, id: CheckpointId) -> None:
        """Leave out what was found damaged, and make again the shards that lie nowhere. Collective, before each try.

        What fails shows when parts are asked for.
        """
        if id != self._about:
            self._about, self._doubted, self._trouble = id, set(), {}
        for _ in range(_MOST_TRIES):
            held = tell(self._paths, id, self._run).dump() if self._is_first else None
            everywhere = self._group.all_gather([sorted(self._doubted), held], "what was found damaged")
            self._doubted = {tuple(place) for places, _ in everywhere for place in places}
            told = {self._seats[rank].node: values for rank, (_, values) in enumerate(everywhere) if values is not None}
            nodes = {node: HeldNode.load(values) for node, values in told.items()}
            nodes |= {name: node for name, node in self._found[id].nodes.items() if name == SHARED}
            self._found[id] = Inventory(nodes).without(self._doubted)
            losses = self._found[id].losses()
            if not losses or not self._remake(id, losses):
                return

    def _remake(self, id: CheckpointId, losses: Sequence[Loss]) -> bool:
        """Whether something is known now that was not before: made again, or found damaged."""
        made: list[int] = []
        failed: dict[str, str] = {}
        doubted: list[Any] = []
        for loss in losses:
            if loss.rank % self._group.size == self._group.rank:
                try:
                    remake(self._paths, id, self._run, self._found[id], loss, self._reach(id))
                    made.append(loss.rank)
                except (OSError, StepwellError) as error:
                    failed[str(loss.rank)] = f"{type(error).__name__}: {error}"
                    place = error.fields.get("place") if isinstance(error, DamagedError) else None
                    doubted += [place] if place is not None else []
        everywhere = self._group.all_gather([made, failed, doubted], "what was lost and made again")
        before = set(self._doubted)
        for rank, (made, failed, doubted) in enumerate(everywhere):
            self._doubted -= {("shard", owner, self._seats[rank].node) for owner in made}
            self._doubted |= {tuple(place) for place in doubted}
            self._trouble |= failed
        return self._doubted != before or any(made for made, _, _ in everywhere)

    def doubt(self, error: Exception) -> None:
        """What this error tells of is not read from there again."""
        place = self._opened.get(str(error.fields.get("path"))) if isinstance(error, DamagedError) else None
        if place is not None:
            self._doubted.add(place)

    def attempts(self, id: CheckpointId) -> int:
        """How often it is worth trying: each time what was found damaged is left out, or made again."""
        found = self._found[id]
        spare = sum(len(found.holders(rank)) - 1 for rank in range(found.world_size or 0))
        is_coded = any(node.parity for node in found.nodes.values())
        return 1 + min(_MOST_TRIES, max(0, spare) + 2 * is_coded)

    def parts(self, id: CheckpointId) -> list[Part]:
        """Each rank's part, whose record is read from the nearest place when it is asked for. Raises DamagedError."""
        found = self._found[id]
        try:
            check_copies({item.rank: item.copies for item in found.shards})
        except VoidError as error:  # rank 0 would have found that out too, had it lived on
            raise DamagedError(f"{id}: {error}") from error
        return [self._part(id, rank, found) for rank in range(found.world_size or 0)]

    def _part(self, id: CheckpointId, rank: int, found: Inventory) -> Part:
        chosen: list[str] = []

        def read() -> Record:
            node, record = self._choose(id, rank, found)
            chosen.append(node)
            return record

        return Part(read, lambda file: self._open(id, rank, chosen[-1], file))

    def _choose(self, id: CheckpointId, rank: int, found: Inventory) -> tuple[str, Record]:
        """The nearest node that gives the record of a rank's shard, and it."""
        holders, errors = found.holders(rank), [self._trouble.get(str(rank), "too little of its set is left")]
        far = [node for node in holders if node not in (self._node, SHARED)]
        turn = self._group.rank % len(far) if far else 0  # the readers spread over the holders
        for node in (self._node, *far[turn:], *far[:turn], SHARED):
            if node in holders and ("shard", rank, node) not in self._doubted:
                try:
                    return node, self._reach(id).shard(node, holders[node])[1]
                except (PeerError, DamagedError) as error:
                    self._doubted.add(("shard", rank, node))
                    errors.append(str(error))
        raise DamagedError(
            f"{id}: the shard of rank {rank} lies in no cache, and cannot be made again: {'; '.join(errors)}"
        )

    def _open(self, id: CheckpointId, rank: int, node: str, file: FileEntry) -> BlockSource:
        source: BlockSource
        if node == self._node:
            place = self._paths.checkpoint(id) / file.name
            assert isinstance(place, Path)
            self._opened[str(place)] = ("shard", rank, node)
            source = FileSource(place)
        elif node == SHARED:
            far = self._shared.checkpoint(id) / file.name
            self._opened[str(far)] = ("shard", rank, node)
            source = open_file(far)
        else:
            source = _Far(PeerSource(self._agent(node), id.directory, file.name, file.nbytes))
            self._opened[source.label] = ("shard", rank, node)
        return source

    def _reach(self, id: CheckpointId) -> RepairReach:
        return RepairReach(self._paths, id, self._run, self._node, self._peer)

    def _peer(self, node: str) -> Reader:
        """An agent on that node; ranks spread over those that it has."""
        return SharedReader(self._shared) if node == SHARED else self._agent(node)

    def _agent(self, node: str) -> Peer:
        if node not in self._peers:
            seats = [seat for seat in self._seats if seat.node == node]
            seat = seats[self._group.rank % len(seats)]
            tls = client_context(self._levels.node.tls)
            self._peers[node] = Peer(seat.address, self._secret, self._run, timeout=_SECONDS, tls=tls, tls_name=NAME)
        return self._peers[node]

    def are_first(self, shared: RunPaths) -> bool:
        """Whether checkpoints go to the caches first: as was asked for, or as a measurement says. Collective."""
        if not self._levels.is_default:
            return True
        nbytes = first_level.probe_bytes(self._group.size)
        node = self._measure("the nodes", self._paths, nbytes)
        far = self._measure("the shared place", shared, nbytes)
        protect = choose_protection(self._levels.node.protect, [seat.domain for seat in self._seats])
        are_first = first_level.is_worth_it(node, far, protect)
        first = "the nodes" if are_first else "the shared place"
        self._log.emit(LevelsChosen(first=first, nbytes=nbytes, node_seconds=node, shared_seconds=far))
        return are_first

    def _measure(self, name: str, paths: RunPaths, nbytes: int) -> float | None:
        """Seconds of the slowest rank, all of them writing at once; None if one of them cannot. Collective."""
        self._group.all_gather(None, f"measuring {name}")
        mine = first_level.write_seconds(paths.root, self._group.rank, nbytes)
        found = self._group.all_gather(mine, f"how fast {name} took it")
        return None if None in found else max(found)

    def orders(self, history: History, restored: CheckpointId | None) -> Orders:
        """What this rank's agent has to know. What was found damaged on this node is not held any more."""
        if restored is not None and restored == self._about:
            mend(self._paths, restored, self._doubted, self._node)
        differs = compare(self._levels.node.protect, [seat.domain for seat in self._seats])
        if differs is not None and self._group.is_leader:
            self._log.emit(differs)
        dead = [id.directory for id in cached.steps(self._paths) if not history.is_live(id)]
        return Orders.make(self._levels, self._run, self._secret, self._seats, dead, restored, self.place)

    def close(self) -> None:
        """Hang up; the agent goes on serving."""
        if self._socket is not None:
            self._socket.close()
        for peer in self._peers.values():
            peer.close()


def _why_not_writable(paths: RunPaths, rank: int) -> list[OSError]:
    """A cache that takes nothing is read, and the run goes on without it."""
    assert isinstance(paths.root, Path)
    try:
        with files.written_for_now(paths.root / f"probe.{rank}", bytes(4096)):
            return []
    except OSError as error:
        return [error]


class _Far:
    """A file in another node's cache: if it cannot be had, the next place is tried."""

    def __init__(self, source: PeerSource) -> None:
        self._source = source
        self.label, self.threads = source.label, source.threads

    def read(self, start: int, nbytes: int, buffer: memoryview) -> memoryview:
        try:
            return self._source.read(start, nbytes, buffer)
        except PeerError as error:
            raise DamagedError(str(error), path=self.label) from error

    def close(self) -> None:
        self._source.close()


def _missing(path: Path) -> list[str]:
    """The first directory on the way to it that is not there, if one is not."""
    return [str(part) for part in (*reversed(path.parents), path) if not os.path.lexists(part)][:1]
