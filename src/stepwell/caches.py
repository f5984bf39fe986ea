"""What the caches of all nodes hold of the run, and the way to it: restore by inventory.

Owns:    meeting the other nodes (who sits where, the secret, this rank's socket), telling and hearing what is held,
         and for each shard of a chosen checkpoint the nearest place to read it from.
Not:     which checkpoint is tried (reopen), serving (agent.door), verified reading (restore).
Holds:   found by content: ranks may come back on other nodes, in any order, or on nodes that hold nothing. What is of
         another history is not looked at. A node that does not answer is a source that fails, never the end.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from stepwell.agent.client import AgentClient
from stepwell.errors import ConfigError, DamagedError, PeerError
from stepwell.format.record import FileEntry, Record
from stepwell.groups.consent import each, lead
from stepwell.groups.group import Group
from stepwell.groups.meet import own_address
from stepwell.levels import cache
from stepwell.levels.copies import fetch_record
from stepwell.levels.fetch import Peer, PeerSource
from stepwell.levels.orders import Orders, Seat, run_cache
from stepwell.levels.secret import draw_secret
from stepwell.levels.serve import listen
from stepwell.levels.spec import Levels
from stepwell.restore.read import FileSource, Source
from stepwell.restore.whole import Part
from stepwell.store import files
from stepwell.store.commit import record_name
from stepwell.store.lineage import History
from stepwell.store.node import node_id
from stepwell.types import CheckpointId, Owner

_STEPS_TOLD: Final = 16
"""Of a node's cache, the newest."""
_SECONDS: Final = 30.0
Holders = dict[int, list[tuple[int, cache.Held]]]
"""For each rank's shard of a checkpoint: who can read it from its own node's cache, and what lies there."""


class Caches:
    """Of one run, as one rank sees them. `meet` is collective."""

    def __init__(self, levels: Levels, run: str, group: Group) -> None:
        self._levels, self._run, self._group = levels, run, group
        self._paths = run_cache(levels.node.path, run, group.rank)
        self._secret = ""
        self._seats: list[Seat] = []
        self._socket: socket.socket | None = None
        self._peers: dict[int, Peer] = {}
        self._found: dict[CheckpointId, Holders] = {}

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
                Path(node.path).mkdir(parents=True, exist_ok=True)
                name = node_id(Path(node.path))
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
            facts = {"root": str(self._paths.root), "run": self._run, "secret": self._secret}
            client.serve(facts, self._socket.fileno())

    def inventory(self) -> dict[str, Any]:
        """What this node holds, as it is told to the others."""
        newest = cache.steps(self._paths)[:_STEPS_TOLD]
        return {id.directory: cache.dump_held(cache.held(self._paths, id, self._run)) for id in newest}

    def hear(self, everywhere: Sequence[dict[str, Any]]) -> None:
        """What all ranks told."""
        for rank, told in enumerate(everywhere):
            for directory, items in told.items():
                id = CheckpointId.parse(directory)
                if id is not None:
                    for item in cache.load_held(items):
                        self._found.setdefault(id, {}).setdefault(item.rank, []).append((rank, item))

    def whole(self, history: History) -> dict[CheckpointId, bool]:
        """The checkpoints of which every part lies in some cache, and whether one of these is suspect."""
        out = {}
        for id, holders in self._found.items():
            whole = [item for items in holders.values() for _, item in items if item.is_whole]
            sizes = {item.world_size for item in whole}
            if history.is_live(id) and len(sizes) == 1 and {item.rank for item in whole} == set(range(*sizes)):
                out[id] = any(item.suspect is not None for item in whole)
        return out

    def parts(self, id: CheckpointId, attempt: int) -> list[Part]:
        """Each rank's part, from the nearest place; another `attempt` takes other places. Raises DamagedError."""
        holders = self._found[id]
        return [self._part(id, rank, holders[rank], attempt) for rank in sorted(holders)]

    def attempts(self, id: CheckpointId) -> int:
        """How many different places there are for the parts of a checkpoint."""
        nodes = [{self._seats[at].node for at, item in items if item.is_whole} for items in self._found[id].values()]
        return max(map(len, nodes))

    def _part(self, id: CheckpointId, rank: int, items: list[tuple[int, cache.Held]], attempt: int) -> Part:
        me = self._group.rank
        mine = self._seats[me].node
        by_node = {self._seats[at].node: (at, item) for at, item in reversed(items) if item.is_whole}
        far = sorted(node for node in by_node if node != mine)
        turn = me % len(far) if far else 0  # the readers spread over the holders
        order = [node for node in (mine, *far[turn:], *far[:turn]) if node in by_node]
        at, item = by_node[order[attempt % len(order)]]
        return self._local(id, item) if self._seats[at].node == mine else self._remote(id, at, item)

    def _local(self, id: CheckpointId, item: cache.Held) -> Part:
        directory = self._paths.checkpoint(id)
        path = directory / record_name(Owner(item.rank))
        record = Record.load(files.get(path), path=str(path))

        def open_source(file: FileEntry) -> Source:
            place = directory / file.name
            assert isinstance(place, Path)
            return FileSource(place)

        return Part(record, open_source)

    def _remote(self, id: CheckpointId, at: int, item: cache.Held) -> Part:
        peer = self._peers.get(at)
        if peer is None:
            peer = self._peers[at] = Peer(self._seats[at].address, self._secret, self._run, timeout=_SECONDS)
        try:
            _, record = fetch_record(peer, id, self._run, item)
        except PeerError as error:
            raise DamagedError(str(error), path=str(error.fields.get("path"))) from error
        return Part(record, lambda file: _Far(PeerSource(peer, id.directory, file.name, file.nbytes)))

    def orders(self, history: History, restored: CheckpointId | None) -> Orders:
        """What this rank's agent has to know."""
        dead = [id.directory for id in cache.steps(self._paths) if not history.is_live(id)]
        held = restored if restored in self._found else None
        return Orders.make(self._levels, self._run, self._secret, self._seats, dead, held)

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
