"""The caches of all nodes, as the ranks of an SCR program see them together.

Owns:    meeting the others (who sits where, the key, this process's server), what all caches hold, bringing every
         part of a dataset to where it is needed, verified, and protecting it.
Not:     which dataset is wanted (restart), copies, parity and rebuilding (levels).
Holds:   found by content: ranks may come back on other nodes. Every byte is read and checked before a dataset is
         offered; what is damaged is dropped where it lies and made again from the others. Sources stay where they are.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from stepwell.adapters.scr.application_files import Description
from stepwell.adapters.scr.parameters import Settings
from stepwell.errors import ConfigError, DamagedError, StepwellError
from stepwell.events.run_events import Event
from stepwell.events.scr_events import Repaired
from stepwell.levels import cached
from stepwell.levels.assignments import Orders, Seat
from stepwell.levels.inventory import Inventory, gather
from stepwell.levels.level_spec import Protection, Shared, Single, choose_protection
from stepwell.levels.node_map import Sitting, find_sittings
from stepwell.levels.peers.connections import Peers
from stepwell.levels.peers.server import PeerServer, listen
from stepwell.levels.protect.copies import copy_shard
from stepwell.levels.protect.parity import RECORD
from stepwell.levels.protect.protection import Duties, near_fill, near_shard
from stepwell.levels.protect.repair import RepairReach, remake, tell
from stepwell.ranks.groups.consent import each, lead
from stepwell.ranks.groups.group import Group
from stepwell.ranks.groups.group_key import common_key
from stepwell.ranks.line.line_meeting import own_address
from stepwell.ranks.wire.secret import derive
from stepwell.storage.format.checksum import document_digest
from stepwell.storage.format.parity_entry import Parity, parity_name
from stepwell.storage.format.record import FileEntry, Record
from stepwell.storage.store import files
from stepwell.storage.store.blocks import Fill, check_blocks
from stepwell.storage.store.commit import record_name
from stepwell.storage.store.node_id import node_id
from stepwell.storage.store.paths import RunPaths
from stepwell.storage.store.private_directory import make_private
from stepwell.storage.store.run_secret import make_shared, read_shared
from stepwell.types import CheckpointId, Owner

_STEPS_TOLD: Final = 16
_TRIES: Final = 3
_EVERYWHERE: Final = "prefix"
"""The one node there is where the prefix itself is the cache."""


@dataclass(frozen=True)
class ProtectedDataset:
    """How it went: bytes written on this node; for all ranks what failed, and for whom nobody could hold anything."""

    nbytes: int
    failed: dict[str, str]
    alone: dict[str, str]


class Nodes:
    """Of one run, as one rank sees them. `meet`, `share`, `bring` and `protect` are collective."""

    def __init__(
        self,
        settings: Settings,
        run: str,
        home: RunPaths,
        prefix: RunPaths,
        group: Group,
        emit: Callable[[Event], None],
    ) -> None:
        """`prefix`: where the run's secret is kept, for all ranks."""
        self._prefix = prefix
        self._settings, self._run, self.home, self._group, self._emit = settings, run, home, group, emit
        self.found: dict[CheckpointId, Inventory] = {}
        self.known: dict[CheckpointId, Description] = {}
        self.unflushed: set[CheckpointId] = set()
        self._server: PeerServer | None = None
        self._peers: Peers | None = None
        self._orders: Orders | None = None

    @property
    def orders(self) -> Orders:
        """Who sits where."""
        assert self._orders is not None
        return self._orders

    @property
    def node(self) -> str:
        return self.orders.peers[self._group.rank].node

    @property
    def is_first_here(self) -> bool:
        """Whether this rank removes what is old on its node."""
        return self.orders.here(self._group.rank)[0] == self._group.rank

    def meet(self) -> None:
        """Learn who sits where, and serve the others. Raises ConfigError."""
        group, settings = self._group, self._settings
        start = lead(group, "the number of this start", lambda: os.urandom(16).hex())
        key = os.urandom(32)  # alone there is nobody to talk to
        if group.size > 1:
            key = common_key(group, self._run, lambda: make_shared(self._prefix), lambda: read_shared(self._prefix))
        secret = derive(key, "scr", f"{self._run}:{start}").hex()
        mine: list[Any] = []

        def prepare() -> None:
            address = os.environ.get("STEPWELL_ADDRESS") or own_address(is_one_node=group.nodes == 1)
            root = self.home.root
            assert isinstance(root, Path)
            try:
                if settings.is_bypass:
                    root.mkdir(parents=True, exist_ok=True)
                else:
                    make_private(
                        root, advice="set SCR_CACHE_BASE to a directory that only you, or only root, can change"
                    )
                    node_id(settings.cache)
                if group.size > 1:
                    self._server = PeerServer(root, secret, self._run, _no_questions, bind=listen((address, 0)))
                    self._server.start()
            except OSError as error:
                raise ConfigError(
                    f"cannot use {root}, or the address {address}: {error}; set SCR_CACHE_BASE"
                ) from error
            port = 0 if self._server is None else self._server.address[1]
            mine.extend([address, port])

        each(group, "the cache of each node", prepare)
        sittings = [Sitting(_EVERYWHERE, _EVERYWHERE)] * group.size
        if not settings.is_bypass:
            sittings = find_sittings(group.all_gather, group.rank, settings.cache, settings.domain, self._emit)
        where = zip(sittings, group.all_gather(mine, "who sits where"), strict=True)
        seats = tuple(Seat(sitting.node, sitting.domain, *address) for sitting, address in where)
        cache_root = str(settings.cache)
        self._orders = Orders(cache_root, self._run, settings.keep, Single(), Shared(), secret, seats)
        # Programs load these files with pickle: a byte that somebody changed on its way may be code.
        self._peers = Peers(self._orders, group.rank, is_sealed=True)

    def forget_dead(self, dead: Sequence[CheckpointId]) -> None:
        """Another history goes on: these may be removed."""
        self._orders = replace(self.orders, dead=tuple(id.directory for id in dead))

    def close(self) -> None:
        """Hang up."""
        if self._peers is not None:
            self._peers.close()
        if self._server is not None:
            self._server.close()

    # -- what the caches hold -----------------------------------------------------------------------------------------

    def share(self) -> None:
        """Tell what this node holds, and hear what the others do."""
        newest = cached.steps(self.home)[:_STEPS_TOLD]
        held = {id.directory: tell(self.home, id, self._run).dump() for id in newest}
        about = {id.directory: self._about(id) for id in newest}
        everywhere = self._group.all_gather([held, about], "what the caches hold")
        seats = self.orders.peers
        self.found = gather([(seats[rank].node, told) for rank, (told, _) in enumerate(everywhere)])
        self.known, self.unflushed = {}, set()
        for _, facts in everywhere:
            for directory, (name, flags, number, is_waiting) in facts.items():
                id = CheckpointId.parse(directory)
                if id is not None:
                    if name is not None:
                        self.known[id] = Description(name, flags, number)
                    if is_waiting:
                        self.unflushed.add(id)

    def _about(self, id: CheckpointId) -> list[Any]:
        """Name, flags and number of a dataset, and whether it is still to be carried to the prefix."""
        level = cached.read_level(self.home, id)
        here = self.orders.here(self._group.rank)
        is_waiting = level is not None and level.flush and not cached.is_flushed(self.home, id, here)
        directory = self.home.checkpoint(id)
        for name in files.list_names(directory):
            if name.startswith("rank-") and name.endswith((".json", RECORD)):
                with contextlib.suppress(DamagedError):
                    found = Description.of(Record.load(files.get(directory / name), path=name))
                    return [found.name, found.flags, found.number, is_waiting]
        return [None, 0, 0, is_waiting]

    def is_whole(self, id: CheckpointId) -> bool:
        """Whether every part can be had from some cache."""
        return id in self.found and self.found[id].losses() is not None

    # -- bringing a dataset to its ranks ------------------------------------------------------------------------------

    def parts_of(self, world_size: int) -> list[int]:
        """The parts that this rank brings to its node: its own, or a share of those of another number of ranks."""
        return [rank for rank in range(world_size) if rank % self._group.size == self._group.rank]

    def bring(self, id: CheckpointId, world_size: int, fetch: Callable[[int], None] | None) -> str | None:
        """Have every part on the node of its rank, each byte checked. None, or why that cannot be done; no half ways.

        fetch:  brings one rank's part from the prefix into this node's cache, verified; None: it is not there
        """
        trouble: dict[int, str] = {}
        self._check_all(id, trouble)
        self.share()
        if id in self.found and self.found[id].losses():
            self._remake(id, trouble)
            self.share()
        for rank in self.parts_of(world_size):
            if not self._has(id, rank):
                self._get(id, rank, fetch, trouble)
        problems = self._group.all_gather({str(rank): why for rank, why in trouble.items()}, "bringing a dataset")
        lost = {int(rank): why for told in problems for rank, why in told.items()}
        if lost:
            rank = min(lost)
            return f"the part of rank {rank}: {lost[rank]}"
        self.share()  # others may ask for a part that was brought
        return None

    def _has(self, id: CheckpointId, rank: int) -> bool:
        found = self.found.get(id)
        return found is not None and self.node in found.holders(rank)

    def _get(self, id: CheckpointId, rank: int, fetch: Callable[[int], None] | None, trouble: dict[int, str]) -> None:
        """One part, from another node or from the prefix."""
        reasons = [trouble.pop(rank)] if rank in trouble else []
        found = self.found.get(id)
        for node, item in found.holders(rank).items() if found is not None else ():
            try:
                copy_shard(self._peer(node), self.home, id, self._run, item)
                return
            except (OSError, StepwellError) as error:
                reasons.append(f"{node}: {error}")
        if fetch is not None:
            try:
                fetch(rank)
                return
            except (OSError, StepwellError) as error:
                reasons.append(f"prefix: {error}")
        trouble[rank] = "; ".join(reasons) or "is in no cache and not in the prefix"

    def _remake(self, id: CheckpointId, trouble: dict[int, str]) -> None:
        for loss in self.found[id].losses() or []:
            if loss.rank % self._group.size == self._group.rank:
                reach = RepairReach(self.home, id, self._run, self.node, self._peer)
                try:
                    remake(self.home, id, self._run, self.found[id], loss, reach)
                except (OSError, StepwellError) as error:
                    trouble[loss.rank] = f"cannot be rebuilt: {error}"

    def _peer(self, node: str) -> Any:
        """Somebody on that node; ranks spread over those that it has."""
        assert self._peers is not None
        ranks = [rank for rank, seat in enumerate(self.orders.peers) if seat.node == node]
        return self._peers.peer(ranks[self._group.rank % len(ranks)])

    # -- checking -----------------------------------------------------------------------------------------------------

    def _check_all(self, id: CheckpointId, trouble: dict[int, str]) -> None:
        """Read what this node holds of a dataset; the ranks of a node share that. What is damaged is dropped.

        Not where the prefix itself is the cache: there is no other copy that it would make room for.
        """
        directory = self.home.checkpoint(id)
        here = self.orders.here(self._group.rank)
        turn = here.index(self._group.rank)
        names = [name for name in files.list_names(directory) if _is_document(name)]
        for name in names[turn :: len(here)]:
            try:
                check_document(directory / name)
            except (OSError, StepwellError) as error:
                if self._settings.is_bypass:
                    trouble[self._group.rank] = str(error)
                    continue
                self._drop(directory, name)
                self._emit(Repaired(step=id.step, what=str(error)))

    def _drop(self, directory: Any, name: str) -> None:
        """Not to be used any more: the document goes first, then its bytes, or they would be taken for whole."""
        stem = name.removesuffix(".json")
        for other in (name, *files.list_names(directory)):
            is_own = (
                other == name or other == f"{stem}.bin" or (other.startswith(f"{stem}.") and other.endswith(".file"))
            )
            if is_own:
                files.remove(directory / other)

    # -- protecting ---------------------------------------------------------------------------------------------------

    def protect(self, id: CheckpointId, protect: Protection) -> ProtectedDataset:
        """Hold what others need held here. Collective."""
        states = self._group.all_gather(self._state(id), "what each rank holds")
        domains = [seat.domain for seat in self.orders.peers]
        scheme = choose_protection(protect, domains)
        duties = Duties.of(scheme, domains, self._group.rank)
        peers = _Told(replace(self.orders, protect=scheme), self._group.rank, states)
        nbytes, failed = 0, None
        try:
            for attempt in range(_TRIES):
                try:
                    done = duties.do(self.home, id, self._run, peers)
                    nbytes, failed = done or 0, None if done is not None else "a part is missing"
                    break
                except (OSError, StepwellError) as error:
                    failed = f"{type(error).__name__}: {error} (try {attempt + 1})"
        finally:
            peers.close()
        told = self._group.all_gather([failed, duties.why_not], "protecting a dataset")
        by_rank = {str(rank): (broken, alone) for rank, (broken, alone) in enumerate(told)}
        return ProtectedDataset(
            nbytes,
            {rank: broken for rank, (broken, _) in by_rank.items() if broken is not None},
            {rank: alone for rank, (_, alone) in by_rank.items() if alone is not None},
        )

    def _state(self, id: CheckpointId) -> dict[str, Any]:
        """What this rank holds of its own; in the words that `levels.duties` asks for."""
        path = self.home.checkpoint(id) / record_name(Owner(self._group.rank))
        try:
            data = files.get(path)
            nbytes = Record.load(data, path=str(path)).nbytes
        except (OSError, DamagedError):  # to be told, not raised: the others wait for an answer
            return {"held": None}
        held = {"digest": document_digest(data), "nbytes": len(data), "data_bytes": nbytes, "suspect": None}
        return {"held": held}

    def states(self, id: CheckpointId) -> list[dict[str, Any]]:
        """What all ranks hold. Collective."""
        return self._group.all_gather(self._state(id), "what all ranks hold")

    def fetch_file(self, id: CheckpointId, rank: int) -> Path:
        """Any rank's part on this node, local: from here or from another node. Raises OSError or StepwellError."""
        if not files.exists(self.home.checkpoint(id) / record_name(Owner(rank))):
            trouble: dict[int, str] = {}
            self._get(id, rank, None, trouble)
            if trouble:
                raise DamagedError(f"{id}: {trouble[rank]}")
        directory = self.home.checkpoint(id)
        assert isinstance(directory, Path)
        return directory


class _Told(Peers):
    """Peers who have said what they hold."""

    def __init__(self, orders: Orders, rank: int, states: Sequence[Mapping[str, Any]]) -> None:
        super().__init__(orders, rank, is_sealed=True)
        self._states = states

    def state(self, rank: int, id: CheckpointId) -> dict[str, Any] | None:
        return dict(self._states[rank])


def _no_questions(question: str, fields: dict[str, Any]) -> dict[str, Any]:
    raise ValueError(f"no such question: {question}")


def _is_document(name: str) -> bool:
    return name.endswith(".json") and name.startswith(("rank-", "parity-"))


def check_document(path: Any) -> None:
    """Read all files of a record, or of a parity document, and compare. Raises OSError or DamagedError."""
    data = files.get(path)
    fill = near_fill(path.parent)
    if path.name.startswith("parity-"):
        found = Parity.load(data, path=str(path))
        if parity_name(found.rank) != path.name:
            raise DamagedError(f"{path}: is about rank {found.rank}", path=str(path))
        _check_file(path.parent, found.file, fill)
        return
    for file in Record.load(data, path=str(path)).files:
        _check_file(path.parent, file, fill)


def _check_file(directory: Any, file: FileEntry, fill: Fill) -> None:
    facts = files.facts(directory / file.name)
    if facts is None or facts.nbytes != file.nbytes:
        found = None if facts is None else facts.nbytes
        raise DamagedError(f"{directory / file.name}: {found} bytes, the record says {file.nbytes}")
    check_blocks(file, fill, str(directory / file.name))


def near_records(home: RunPaths, id: CheckpointId, world_size: int) -> dict[int, Record]:
    """The records that lie in this node's cache."""
    out = {}
    for rank in range(world_size):
        if files.exists(home.checkpoint(id) / record_name(Owner(rank))):
            out[rank] = near_shard(home, id, rank)[1]
    return out
