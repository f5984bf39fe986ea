"""What the caches of all nodes hold of the run, and the way to it: restore by inventory.

Owns:    meeting the other nodes (who sits where, the secret, this rank's socket), telling and hearing what is held,
         for each shard of a chosen checkpoint the nearest place to read it from, and making again what lies nowhere.
Not:     which checkpoint is tried (reopen), serving (agent.door), verified reading (restore).
Holds:   found by content: ranks may come back on other nodes, in any order, or on nodes that hold nothing. What is of
         another history is not looked at. A node that does not answer is a source that fails, never the end. What one
         rank finds damaged no rank reads again.
"""

from __future__ import annotations

import functools
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from stepwell.agent.client import AgentClient
from stepwell.errors import ConfigError, DamagedError, PeerError, StepwellError, VoidError
from stepwell.format.record import FileEntry
from stepwell.groups.consent import each, lead
from stepwell.groups.group import Group
from stepwell.groups.meet import own_address
from stepwell.journal import EventLog
from stepwell.levels import cache, choose
from stepwell.levels.events import LevelsChosen
from stepwell.levels.fetch import Peer, PeerSource
from stepwell.levels.inventory import Inventory, Loss, Node, Place, gather
from stepwell.levels.mend import mend
from stepwell.levels.orders import Orders, Seat, run_cache
from stepwell.levels.remake import Reach, remake, tell
from stepwell.levels.secret import draw_secret
from stepwell.levels.serve import listen
from stepwell.levels.spec import Levels, choose_protection
from stepwell.levels.tls import NAME, client_context, server_context
from stepwell.restore.read import FileSource, Source
from stepwell.restore.whole import Part
from stepwell.store.assemble import check_copies
from stepwell.store.lineage import History
from stepwell.store.node import node_id
from stepwell.store.paths import RunPaths
from stepwell.types import CheckpointId

_STEPS_TOLD: Final = 16
"""Of a node's cache, the newest."""
_SECONDS: Final = 30.0
_MOST_TRIES: Final = 8


class Caches:
    """Of one run, as one rank sees them. `meet`, `share` and `complete` are collective."""

    def __init__(self, levels: Levels, run: str, group: Group, log: EventLog) -> None:
        self._levels, self._run, self._group, self._log = levels, run, group, log
        self._paths = run_cache(levels.node.path, run, group.rank)
        self._secret = ""
        self._seats: list[Seat] = []
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

    def meet(self, client: AgentClient) -> None:
        """Learn who sits where, and let this rank's agent serve the others, once. Collective. Raises ConfigError."""
        if self._seats:
            return
        group, node = self._group, self._levels.node
        self._secret = lead(group, "the secret of this start", draw_secret)
        mine: list[Any] = []

        def prepare() -> None:
            address = node.address or os.environ.get("STEPWELL_ADDRESS") or own_address(is_one_node=group.nodes == 1)
            try:
                assert isinstance(self._paths.root, Path)
                self._paths.root.mkdir(parents=True, exist_ok=True)
                name = node_id(Path(node.path))
                server_context(node.tls)  # the agent makes its own: this is where somebody reads what is wrong
                self._socket = None if group.size == 1 else listen((address, 0))
            except OSError as error:
                raise ConfigError(
                    f"the cache of this node, {node.path}, or the address {address} cannot be used: {error}; "
                    "give Node() another path or address",
                    path=str(node.path),
                ) from error
            port = 0 if self._socket is None else self._socket.getsockname()[1]
            mine.extend([name, node.domain or name, address, port])

        each(group, "the cache of each node", prepare)
        self._seats = [Seat(*seat) for seat in group.all_gather(mine, "who sits where")]
        if self._socket is not None:
            facts = {"root": str(self._paths.root), "run": self._run, "secret": self._secret, "tls": node.tls}
            client.serve(facts, self._socket.fileno())

    def share(self) -> None:
        """Tell what this node holds, and hear what the others do. Collective."""
        newest = cache.steps(self._paths)[:_STEPS_TOLD]
        told = {id.directory: tell(self._paths, id, self._run).dump() for id in newest}
        everywhere = self._group.all_gather(told, "what the caches hold")
        self._found = gather([(self._seats[rank].node, steps) for rank, steps in enumerate(everywhere)])

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
            told = [sorted(self._doubted), tell(self._paths, id, self._run).dump()]
            everywhere = self._group.all_gather(told, "what was found damaged")
            self._doubted = {tuple(place) for places, _ in everywhere for place in places}
            nodes = {self._seats[rank].node: Node.load(values) for rank, (_, values) in enumerate(everywhere)}
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
        """Each rank's part, from the nearest place. Raises DamagedError."""
        found = self._found[id]
        parts = [self._part(id, rank, found) for rank in range(found.world_size or 0)]
        try:
            check_copies({part.record.owner.rank: part.record.copies for part in parts})
        except VoidError as error:  # rank 0 would have found that out too, had it lived on
            raise DamagedError(f"{id}: {error}") from error
        return parts

    def _part(self, id: CheckpointId, rank: int, found: Inventory) -> Part:
        holders, errors = found.holders(rank), [self._trouble.get(str(rank), "too little of its set is left")]
        far = [node for node in holders if node != self._node]
        turn = self._group.rank % len(far) if far else 0  # the readers spread over the holders
        for node in (self._node, *far[turn:], *far[:turn]):
            if node in holders and ("shard", rank, node) not in self._doubted:
                try:
                    record = self._reach(id).shard(node, holders[node])[1]
                    return Part(record, functools.partial(self._open, id, rank, node))
                except (PeerError, DamagedError) as error:
                    self._doubted.add(("shard", rank, node))
                    errors.append(str(error))
        raise DamagedError(
            f"{id}: the shard of rank {rank} lies in no cache, and cannot be made again: {'; '.join(errors)}"
        )

    def _open(self, id: CheckpointId, rank: int, node: str, file: FileEntry) -> Source:
        source: Source
        if node == self._node:
            place = self._paths.checkpoint(id) / file.name
            assert isinstance(place, Path)
            self._opened[str(place)] = ("shard", rank, node)
            source = FileSource(place)
        else:
            source = _Far(PeerSource(self._peer(node), id.directory, file.name, file.nbytes))
            self._opened[source.label] = ("shard", rank, node)
        return source

    def _reach(self, id: CheckpointId) -> Reach:
        return Reach(self._paths, id, self._run, self._node, self._peer)

    def _peer(self, node: str) -> Peer:
        """An agent on that node; ranks spread over those that it has."""
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
        nbytes = choose.probe_bytes(self._group.size)
        node = self._measure("the nodes", self._paths, nbytes)
        far = self._measure("the shared place", shared, nbytes)
        protect = choose_protection(self._levels.node.protect, [seat.domain for seat in self._seats])
        are_first = choose.is_worth_it(node, far, protect)
        first = "the nodes" if are_first else "the shared place"
        self._log.emit(LevelsChosen(first=first, nbytes=nbytes, node_seconds=node, shared_seconds=far))
        return are_first

    def _measure(self, name: str, paths: RunPaths, nbytes: int) -> float | None:
        """Seconds of the slowest rank, all of them writing at once; None if one of them cannot. Collective."""
        self._group.all_gather(None, f"measuring {name}")
        mine = choose.write_seconds(paths.root, self._group.rank, nbytes)
        found = self._group.all_gather(mine, f"how fast {name} took it")
        return None if None in found else max(found)

    def orders(self, history: History, restored: CheckpointId | None) -> Orders:
        """What this rank's agent has to know. What was found damaged on this node is not held any more."""
        if restored is not None and restored == self._about:
            mend(self._paths, restored, self._doubted, self._node)
        dead = [id.directory for id in cache.steps(self._paths) if not history.is_live(id)]
        return Orders.make(self._levels, self._run, self._secret, self._seats, dead, restored)

    def close(self) -> None:
        """Hang up; the agent goes on serving."""
        if self._socket is not None:
            self._socket.close()
        for peer in self._peers.values():
            peer.close()


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
