"""The node level: each rank's part goes to its node's own disk, and all ranks agree without any shared place.

Owns:    writing this rank's part, its duties for other nodes (copies, parity), the agreement that all hold it, and
         what is removed from the cache of this node.
Not:     the way to the shared place (flush), the bytes of parity (levels.codes).
Holds:   no shared file system is touched here. What a rank says is what lies on its disk, so an agent that died and
         came back says the same. A checkpoint is whole when rank 0 has seen every part and every duty done, or
         given up; only then anything older goes.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from stepwell import events, journal
from stepwell.agent.persist import Persister
from stepwell.agent.queue import AbandonedError, Pending
from stepwell.agent.writer import Writer
from stepwell.errors import DamagedError, FencedError, StepwellError, VoidError
from stepwell.faults import crash_point
from stepwell.format.checksum import document_digest
from stepwell.format.manifest import Void
from stepwell.format.record import Record
from stepwell.levels import cache, room, verdict
from stepwell.levels.cache import Level
from stepwell.levels.copies import copy_shard
from stepwell.levels.duties import Duties
from stepwell.levels.events import Degraded, Protected
from stepwell.levels.orders import Orders, run_cache
from stepwell.levels.peers import Peers
from stepwell.store import assemble, commit, files, retention
from stepwell.store.catalog import Entry
from stepwell.store.objects import Location
from stepwell.store.spare import is_left_over
from stepwell.types import CheckpointId, Keep, Owner

_TRIES: Final = 3
"""How often a duty is tried before the checkpoint is called degraded."""
_MOST_UNDECIDED: Final = 4
"""Parts of newer checkpoints on this node that wait for a rank: its disk must not be filled with them."""


class Keeper(Persister):
    """Persists to the cache of this node. Constructing only assigns.

    may_flush:  asked by rank 0: whether one more may be carried to the shared place, beside those under way
    on_whole:   told of each checkpoint that is to be carried there
    """

    @property
    def may_prune(self) -> bool:
        """Each node has its own cache."""
        return True

    def __init__(
        self, orders: Orders, owner: Owner, log: journal.EventLog, writer: Writer, *, lineage: int, patience: float
    ) -> None:
        super().__init__(
            run_cache(orders.cache, orders.run, owner.rank), log, writer, lineage=lineage, patience=patience
        )
        self.orders, self.owner, self._lineage = orders, owner, lineage
        self.peers = Peers(orders)
        self.may_flush: Callable[[], bool] = lambda: True
        self.on_whole: Callable[[CheckpointId], None] = lambda id: None
        self._duties = Duties.of(orders.protect, [seat.domain for seat in orders.peers], owner.rank)
        self._tries: dict[CheckpointId, int] = {}
        self._failed: dict[CheckpointId, str] = {}
        self._done: set[CheckpointId] = set()
        self._known: dict[CheckpointId, dict[str, Any]] = {}
        """What was said of this rank's records, which never change."""
        self._whole: list[CheckpointId] = []
        self._has_recalled = False
        self._words: dict[CheckpointId, str] = {}
        self._undecided: set[CheckpointId] = set()

    # -- this rank's part ---------------------------------------------------------------------------------------------

    def persist(self, pending: Pending) -> bool:
        """Make this rank's part durable on this node. See `Persister`; never the last word, `follow` has it."""
        started = time.monotonic()
        crash_point("persist.begin")
        self._check_fence(pending.id)
        pending.record = assemble.find_record(self.paths, pending.id, pending.owner)
        if pending.record is None:
            directory = self.open(pending)
            try:
                entries = self.write(pending, directory)
            except AbandonedError:
                with contextlib.suppress(OSError):  # other ranks of this node may have written theirs
                    files.remove_directory(directory)
                raise
            self.finish(pending, entries, started)
        return False

    def open(self, pending: Pending) -> Path:
        """Make the checkpoint's directory in the cache."""
        directory = self.paths.checkpoint(pending.id)
        assert isinstance(directory, Path) and isinstance(self.paths.root, Path)
        self.paths.root.mkdir(parents=True, exist_ok=True)
        files.make_directory(directory)
        commit.sweep(directory, pending.owner)
        return directory

    def _check_fence(self, id: CheckpointId) -> None:
        """What a trainer before this one took is of no use, but for what all went on from. Raises FencedError.

        It may lie on the run's path all the same, and whole: nothing is removed here.
        """
        if id.lineage != self._lineage and id.directory != self.orders.again:
            message = f"lineage {self._lineage} continues this run from another checkpoint; {id} is not finished"
            raise FencedError(message, lineage=id.lineage, newest=self._lineage)

    def settle(self, pending: Pending, record: Record, started: float) -> bool:
        """All files are durable: the record, for whoever asks."""
        pending.record = assemble.leave_record(self.paths, record)
        self._undecided.add(pending.id)
        return False

    def void(self, void: Void) -> None:
        """This rank has no part in a checkpoint: the next one who asks is told, even if the disk is full."""
        self._words[void.id] = f"rank {void.rank}: {void.reason}"
        assert isinstance(self.paths.root, Path)
        self.paths.root.mkdir(parents=True, exist_ok=True)
        files.make_directory(self.paths.checkpoint(void.id))
        files.put_new(assemble.void_path(self.paths, void), void.dump(), point="void")
        if void.rank == 0:
            files.put_new(self.paths.void(void.id), void.dump(), point="void")
        self.log.emit(events.PersistFailed(step=void.id.step, error=void.reason, action="void for all ranks"))

    # -- what other ranks are told ------------------------------------------------------------------------------------

    def answer(self, question: str, fields: dict[str, Any]) -> dict[str, Any]:
        """Any thread: what lies on this node of one checkpoint, as far as this rank is concerned."""
        id = CheckpointId.parse(str(fields.get("id")))
        if id is None or question not in ("state", "shards"):
            raise ValueError(f"no such question: {question}")
        return self.state(id) if question == "state" else cache.describe(self.paths, id, self.orders.run)

    def state(self, id: CheckpointId) -> dict[str, Any]:
        """What this rank can say about a checkpoint."""
        directory, paths = self.paths.checkpoint(id), self.paths
        names = set(files.list_names(directory))
        mine = commit.record_name(self.owner)
        held: dict[str, Any] | None = None
        if mine in names:
            held = self._known.get(id) or self._read(directory / mine)
            self._known[id] = held
        void, word = f"{self.owner.stem}.void", self._words.get(id)
        level = cache.read_level(paths, id) if "manifest.json" in names else None
        return {
            "held": held,
            "is_ready": id in self._done or self._duties.is_done(paths, id),
            "failed": self._failed.get(id),
            "unprotected": self._duties.why_not,
            "void": assemble.say(directory / void) if void in names else word,
            "ended": assemble.say(paths.void(id)) if "void.json" in names else word if self.owner.is_leader else None,
            "manifest": None if level is None else files.get(paths.manifest(id)).decode(),
            "level": None if level is None else level.dump().decode(),
            "newest": self._whole[-1].directory if self._whole else "",
        }

    def _read(self, path: Location) -> dict[str, Any]:
        data = files.get(path)
        record = Record.load(data, path=str(path))
        held = {"digest": document_digest(data), "nbytes": len(data), "data_bytes": record.nbytes}
        return held | {"suspect": record.suspect, "copies": record.copies}

    # -- all ranks ----------------------------------------------------------------------------------------------------

    def follow(self, pending: Pending) -> bool:
        """Do what other ranks' parts need of this one; look whether all hold it. Raises VoidError."""
        id = pending.id
        assert pending.written_at is not None
        self._check_fence(id)
        waited = time.monotonic() - pending.written_at
        if not files.exists(self.paths.manifest(id)):
            self._protect(id)
            try:
                is_whole = self._lead(pending, waited) if self.owner.is_leader else self._ask_leader(id, waited)
            except VoidError:
                self._withdraw(id)
                raise
            if not is_whole:
                return False
        self._note_whole(pending)
        return True

    def _lead(self, pending: Pending, waited: float) -> bool:
        """Rank 0: whether every rank holds its part, and has done its duties."""
        id, world_size = pending.id, self.owner.world_size
        newer = sum(other > id for other in self._undecided)
        states = {0: self.state(id)}
        for rank in range(1, world_size):
            state = self.peers.state(rank, id)
            if state is None:
                break  # without it there is nothing to decide: a node that hangs would be waited for rank by rank
            states[rank] = state
        try:
            missing = verdict.missing(states, world_size)
            if missing and (waited > self.patience or newer >= _MOST_UNDECIDED):
                why = f"no part within {waited:.0f} s, and {newer} newer checkpoints wait for this one"
                raise VoidError(why, rank=missing[0])
            if missing:
                return False
            verdict.check_copies(states)
        except VoidError as error:
            rank = int(str(error.fields.get("rank", 0)))
            reason = str(error).removeprefix(f"rank {rank}: ")
            self._words[id] = f"rank {rank}: {reason}"
            with contextlib.suppress(OSError):  # a full disk: the others are told all the same
                files.put_new(self.paths.void(id), Void(pending.run, id, rank, reason).dump(), point="void")
            raise
        if verdict.unready(states) and waited < self.patience and newer < _MOST_UNDECIDED:
            return False
        self._decide(pending, states)
        return True

    def _decide(self, pending: Pending, states: verdict.States) -> None:
        """Let it be whole: first what is to become of it, then the manifest."""
        degraded = verdict.degraded(states)
        since = self._since_flush(pending.id) + 1
        is_due = since >= self.orders.shared.every and self.may_flush()
        flush = bool(pending.meta.get("flush")) or is_due
        manifest = verdict.make_manifest(pending.run, pending.id, pending.meta, states)
        self._keep_decision(pending.id, manifest.dump(), Level(flush, degraded, 0 if flush else since).dump())
        if degraded:
            self.log.emit(Degraded(step=pending.id.step, ranks=sorted(map(int, degraded)), reasons=degraded))

    def _since_flush(self, id: CheckpointId) -> int:
        """How many were whole since one was carried on: as the newest before this one says, whoever decided that."""
        for other in cache.steps(self.paths):
            if other < id and other.directory not in self.orders.dead:
                level = cache.read_level(self.paths, other)
                if level is not None:
                    return level.since
        return 0

    def _keep_decision(self, id: CheckpointId, manifest: bytes, level: bytes) -> None:
        files.put_new(self.paths.checkpoint(id) / "level.json", level, point="level")
        files.put_new(self.paths.manifest(id), manifest, point="manifest")
        crash_point("manifest.durable")

    def _ask_leader(self, id: CheckpointId, waited: float) -> bool:
        """Another rank: what rank 0 decided."""
        state = self.peers.state(0, id)
        if state is None or (state["manifest"] is None and state["ended"] is None):
            newest = CheckpointId.parse(state["newest"]) if state is not None else None
            if newest is not None and newest > id and state is not None and state["held"] is None:
                return True  # removed there to make room, before this rank looked
            if waited > 2 * self.patience:
                raise VoidError(f"rank 0 did not end {id} within {waited:.0f} s")
            return False
        if state["ended"] is not None:
            raise VoidError(state["ended"])
        self._keep_decision(id, state["manifest"].encode(), state["level"].encode())
        return True

    def _recall(self) -> None:
        """What an agent of this start before this one knew: what is whole, and on its way to the shared place."""
        if self._has_recalled:
            return
        for id in reversed(cache.steps(self.paths)):
            if id.lineage == self._lineage and files.exists(self.paths.manifest(id)) and id not in self._whole:
                self._whole = sorted([*self._whole, id])
                self._pass_on(id)
        self._has_recalled = True

    def _note_whole(self, pending: Pending) -> None:
        id, record = pending.id, pending.record
        self._undecided.discard(id)
        self._recall()
        if id not in self._whole:
            self._whole.append(id)
            self._whole.sort()
        self._pass_on(id)
        started = pending.written_at or time.monotonic()
        nbytes, is_suspect = (record.nbytes, record.suspect is not None) if record is not None else (0, False)
        self.note_commit(pending, nbytes, started, is_suspect=is_suspect)

    def _pass_on(self, id: CheckpointId) -> None:
        """To the shared place, if it is to go there; again if that was broken off."""
        level = cache.read_level(self.paths, id)
        if level is not None and level.flush and not cache.is_flushed(self.paths, id, [self.owner.rank]):
            self.on_whole(id)

    def has_newer(self, id: CheckpointId) -> bool:
        """Whether a newer one is whole."""
        return any(other > id for other in self._whole)

    def why_degraded(self, id: CheckpointId) -> str | None:
        """Which ranks have no protection, and why."""
        level = cache.read_level(self.paths, id)
        return None if level is None else level.why_degraded

    def _withdraw(self, id: CheckpointId) -> None:
        """It is void: this rank's bytes go at once, and those it holds for others."""
        self._undecided.discard(id)
        for path in room.withdrawn(self.paths, id, self.owner.rank, self._duties.copies):
            if self.shelf.spare is None or not self.shelf.spare.keep(path):
                files.remove(path)

    # -- duties -------------------------------------------------------------------------------------------------------

    def _protect(self, id: CheckpointId) -> None:
        """Hold what other ranks need held here, once they have their parts. A failure counts, and is told."""
        if id in self._done or id in self._failed:
            return
        started = time.monotonic()
        try:
            nbytes = self._duties.do(self.paths, id, self.orders.run, self.peers)
        except (OSError, StepwellError) as error:
            self._tries[id] = self._tries.get(id, 0) + 1
            if self._tries[id] >= _TRIES:
                self._failed[id] = f"{type(error).__name__}: {error}"
            return
        if nbytes is not None:
            self._done.add(id)
            if nbytes:
                self.log.emit(Protected(step=id.step, nbytes=nbytes, seconds=time.monotonic() - started))

    def rehold(self, id: CheckpointId) -> bool:
        """The checkpoint that all went on from, on this node, and protected as who sits where now asks for.

        False: not yet. Raises OSError or DamagedError.
        """
        is_held = False
        with contextlib.suppress(DamagedError):  # one that cannot be read is copied anew
            is_held = assemble.find_record(self.paths, id, self.owner) is not None
        if not is_held or not files.exists(self.paths.manifest(id)):
            self._rehold_part(id)
        self._pass_on(id)  # at once, on all ranks: rank 0 would wait for one that had found a newer one first
        if self.has_newer(id):
            return True
        self._protect(id)
        if id not in self._done and id not in self._failed:
            return False
        if id in self._done and id not in self._whole:
            self._whole = sorted([id, *self._whole])
        return True

    def _rehold_part(self, id: CheckpointId) -> None:
        for rank in self.orders.one_of_each_node():
            is_here = rank == self.owner.rank
            found = cache.describe(self.paths, id, self.orders.run) if is_here else self.peers.shards(rank, id)
            if found is None:
                continue
            if found["decision"] is not None and files.is_directory(self.paths.checkpoint(id)):
                self._keep_decision(id, *(text.encode() for text in found["decision"]))
            for item in cache.load_held(found["shards"]):
                if item.rank == self.owner.rank and item.is_whole and not is_here:
                    copy_shard(self.peers.peer(rank), self.paths, id, self.orders.run, item)

    # -- room ---------------------------------------------------------------------------------------------------------

    def prune(self, lineage: int, keep: Keep) -> bool:
        """Remove from this node's cache what newer whole checkpoints make needless. The lowest rank of a node does."""
        is_clean = True
        if self._whole and self.orders.here(self.owner.rank)[0] == self.owner.rank:
            for id in room.surplus(self.paths, self.orders, self.owner.rank, self._whole):
                entry = Entry(id, self.paths.checkpoint(id), None, None, is_live=True)
                try:
                    retention.remove_checkpoint(entry, self.shelf.spare)
                except (OSError, StepwellError) as error:
                    is_clean = False
                    self.log.emit(events.PruneFailed(directory=id.directory, error=str(error)))
        self._forget()
        return is_clean

    def _forget(self) -> None:
        """What was removed needs no memory."""
        there = set(cache.steps(self.paths))
        self._whole = [id for id in self._whole if id in there] or self._whole[-1:]
        self._done &= there
        self._tries = {id: tries for id, tries in self._tries.items() if id in there}
        self._failed = {id: why for id, why in self._failed.items() if id in there}
        self._known = {id: held for id, held in self._known.items() if id in there}
        self._words = {id: word for id, word in self._words.items() if not self.has_newer(id)}

    def sweep(self, lineage: int) -> bool:
        """Remove what agents that died left under temporary names."""
        self._recall()
        for id in cache.steps(self.paths):
            commit.sweep(self.paths.checkpoint(id), self.owner)
        for path in room.left_over(self.paths, lineage):
            files.remove(path)
        for name in files.list_names(self.paths.root):
            if is_left_over(name, lineage):
                files.remove(self.paths.root / name)
        return True

    def close(self) -> None:
        """No more checkpoints."""
        super().close()
        self.peers.close()
