"""The node level: each rank's part goes to its node's own disk, and all ranks agree without any shared place.

Owns:    writing this rank's part, the agreement that all hold theirs, and what is removed from the cache of this node.
Not:     the duties for other nodes (redundancy), the way to the shared place (flush).
Holds:   no shared file system is touched here, but by a rank whose node cannot hold its part (spill). What a rank says
         is what lies on its disk, so an agent that died and came back says the same. A checkpoint is whole when rank 0
         has seen every part and every duty done, or given up; only then anything older goes.
"""

from __future__ import annotations

import contextlib
import errno
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from stepwell.agent.files.writer import Writer
from stepwell.agent.pending import AbandonedError, Pending
from stepwell.agent.target.answers import Answers
from stepwell.agent.target.hearing import Hearing
from stepwell.agent.target.rank0_decisions import Decisions
from stepwell.agent.target.redundancy import Redundancy
from stepwell.agent.target.shared_target import Persister
from stepwell.agent.target.spill import Spill
from stepwell.errors import ConfigError, DamagedError, FencedError, StepwellError, VoidError
from stepwell.events import journal, run_events
from stepwell.events.level_events import CacheFailing, CacheWorks, Degraded
from stepwell.faults import crash_point
from stepwell.levels import cache_retention, cached, level_verdict
from stepwell.levels.assignments import Orders, open_cache, run_cache
from stepwell.levels.cached import Level
from stepwell.levels.peers.connections import Peers
from stepwell.levels.protect.copies import copy_shard
from stepwell.storage.format.manifest import Void
from stepwell.storage.format.record import Record
from stepwell.storage.store import assemble, commit, files, retention
from stepwell.storage.store.spare import is_left_over, put_away
from stepwell.types import CheckpointId, Keep, Owner

_MOST_UNDECIDED: Final = 4
"""Parts of newer checkpoints on this node that wait for a rank: its disk must not be filled with them."""

_PARTS_TO_TRUST: Final = 3
"""A full disk takes one now and then: that is not said each time."""


class NodeTarget(Persister):
    """Persists to the cache of this node. Constructing only assigns.

    may_flush:  asked by rank 0: whether one more may be carried to the shared place, beside those under way
    on_whole:   told of each checkpoint that is to be carried there
    on_newest:  told of each one that is whole
    """

    @property
    def may_prune(self) -> bool:
        """Each node has its own cache."""
        return True

    def __init__(
        self,
        orders: Orders,
        owner: Owner,
        log: journal.EventLog,
        writer: Writer,
        spill: Spill,
        *,
        lineage: int,
        patience: float,
    ) -> None:
        paths = run_cache(orders.cache, orders.run, owner.rank)
        super().__init__(paths, log, writer, lineage=lineage, patience=patience)
        self.orders, self.owner, self.spill, self._lineage = orders, owner, spill, lineage
        self.peers = Peers(orders, owner.rank)
        self.may_flush: Callable[[], bool] = lambda: True
        self.on_whole: Callable[[CheckpointId], None] = lambda id: None
        self.on_newest: Callable[[CheckpointId], None] = lambda id: None
        self.redundancy = Redundancy(orders, owner.rank, self.paths, spill.paths, self.peers, log)
        self.decisions = Decisions(self.paths)
        self.answers = Answers(self.paths, owner, orders.run, self.redundancy, self.decisions, spill)
        self._hearing = Hearing(self.answers, self.peers, orders, owner.rank)
        self._whole: list[CheckpointId] = []
        self._has_recalled = False
        self._undecided: set[CheckpointId] = set()
        self._degraded: set[str] = set()
        """Ranks, of the last checkpoint: said again when they are others."""
        self._failing_for = 0
        """The cache of this node took nothing: so many parts it has to take until it is trusted again."""

    # -- this rank's part ---------------------------------------------------------------------------------------------

    def persist(self, pending: Pending) -> bool:
        """Make this rank's part durable on this node. See `Persister`; never the last word, `follow` has it."""
        started = time.monotonic()
        crash_point("persist.begin")
        self._check_fence(pending.id)
        try:
            pending.record = assemble.find_record(self.paths, pending.id, pending.owner)
            if pending.record is None:
                self._write_here(pending, started)
        except OSError as error:
            if self.fall_back(error).persist(pending):
                return True
            self._undecided.add(pending.id)
        return False

    def _write_here(self, pending: Pending, started: float) -> None:
        directory = self.open(pending)
        try:
            entries = self.write(pending, directory)
        except AbandonedError:
            with contextlib.suppress(OSError):  # other ranks of this node may have written theirs
                files.remove_directory(directory)
            raise
        self.finish(pending, entries, started)

    def fall_back(self, error: OSError) -> Persister:
        """This node cannot hold the part of this rank: it goes straight to the shared place."""
        was_failing, self._failing_for = self._failing_for, _PARTS_TO_TRUST
        if not was_failing:
            self.log.emit(CacheFailing(path=self.orders.cache, error=str(error)))
        return self.spill

    def open(self, pending: Pending) -> Path:
        """Make the checkpoint's directory in the cache."""
        directory = self.paths.checkpoint(pending.id)
        assert isinstance(directory, Path)
        self._open_cache()
        files.make_directory(directory)
        commit.sweep(directory, pending.owner)
        return directory

    def _open_cache(self) -> None:
        """Look again each time: who cleans up a disk may have removed it, and a stranger made another. OSError."""
        try:
            open_cache(self.paths)
        except ConfigError as error:
            raise PermissionError(errno.EPERM, str(error)) from error

    def _check_fence(self, id: CheckpointId) -> None:
        """What a trainer before this one took is of no use, but for what all went on from. Raises FencedError.

        It may lie on the run's path all the same, and whole: nothing is removed here.
        """
        if id.lineage != self._lineage and id.directory != self.orders.again:
            message = f"lineage {self._lineage} continues this run from another checkpoint; {id} stays unfinished"
            raise FencedError(message, lineage=id.lineage, newest=self._lineage)

    def settle(self, pending: Pending, record: Record, started: float) -> bool:
        """All files are durable: the record, for whoever asks."""
        pending.record = assemble.leave_record(self.paths, record)
        self._undecided.add(pending.id)
        if self._failing_for:
            self._failing_for -= 1
            if not self._failing_for:
                self.log.emit(CacheWorks(path=self.orders.cache))
        return False

    def void(self, void: Void) -> None:
        """This rank has no part in a checkpoint: the next one who asks is told, even if the disk is full."""
        self.answers.say_void(void.id, f"rank {void.rank}: {void.reason}")
        try:
            self._open_cache()
            files.make_directory(self.paths.checkpoint(void.id))
            files.put_new(assemble.void_path(self.paths, void), void.dump(), point="void")
            if void.rank == 0:
                files.put_new(self.paths.void(void.id), void.dump(), point="void")
        except OSError:
            if not self._failing_for:
                raise
        self.log.emit(run_events.PersistFailed(step=void.id.step, error=void.reason, action="void for all ranks"))

    def answer(self, question: str, fields: dict[str, Any]) -> dict[str, Any]:
        """Any thread: another rank asks."""
        return self.answers.answer(question, fields)

    # -- all ranks ----------------------------------------------------------------------------------------------------

    def follow(self, pending: Pending) -> bool:
        """Do what other ranks' parts need of this one; look whether all hold it. Raises VoidError."""
        id = pending.id
        assert pending.written_at is not None
        self._check_fence(id)
        waited = time.monotonic() - pending.written_at
        if not self.decisions.has(id):
            self.redundancy.protect(id)
            try:
                is_whole = self._lead(pending, waited) if self.owner.is_leader else self._ask_leader(id, waited)
            except VoidError as error:
                self._undecided.discard(id)
                if self.owner.is_leader or error.fields.get("is_ended"):  # else rank 0 may have called it whole
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
        states = self._hearing.ask(id, world_size)
        try:
            missing = level_verdict.missing(states, world_size)
            if missing and (waited > self.patience or newer >= _MOST_UNDECIDED):
                why = f"no part within {waited:.0f} s, and {newer} newer checkpoints are waiting"
                raise VoidError(why, rank=missing[0])
            if missing:
                return False
            level_verdict.check_copies(states)
        except VoidError as error:
            rank = int(str(error.fields.get("rank", 0)))
            reason = str(error).removeprefix(f"rank {rank}: ")
            self.answers.say_void(id, f"rank {rank}: {reason}")
            with contextlib.suppress(OSError):  # a full disk: the others are told all the same
                files.put_new(self.paths.void(id), Void(pending.run, id, rank, reason).dump(), point="void")
            raise
        if level_verdict.unready(states) and waited < self.patience and newer < _MOST_UNDECIDED:
            return False
        self._decide(pending, states)
        return True

    def _decide(self, pending: Pending, states: level_verdict.States) -> None:
        """Let it be whole: first what is to become of it, then the manifest."""
        degraded = level_verdict.degraded(states)
        since = self.decisions.since_flush(pending.id, self.orders.dead) + 1
        is_due = since >= self.orders.shared.every and self.may_flush()
        flush = pending.request.flush or is_due
        manifest = level_verdict.make_manifest(pending.run, pending.id, pending.request, states)
        self.decisions.keep(pending.id, manifest.dump(), Level(flush, degraded, 0 if flush else since).dump())
        if degraded.keys() != self._degraded and degraded:
            self.log.emit(Degraded(step=pending.id.step, ranks=sorted(map(int, degraded)), reasons=degraded))
        self._degraded = set(degraded)

    def _ask_leader(self, id: CheckpointId, waited: float) -> bool:
        """Another rank: what rank 0 decided."""
        if self._hearing.is_anothers_turn(waited):
            return False
        state = self.peers.state(0, id)
        if state is None:
            self._let_go(id)
        if state is None or (state["manifest"] is None and state["ended"] is None):
            newest = CheckpointId.parse(state["newest"]) if state is not None else None
            if newest is not None and newest > id and state is not None and state["held"] is None:
                return True  # removed there to make room, before this rank looked
            if waited > 2 * self.patience:
                raise VoidError(f"rank 0 did not finish {id} within {waited:.0f} s")
            return False
        if state["ended"] is not None:
            raise VoidError(state["ended"], is_ended=True)
        self.decisions.keep(id, state["manifest"].encode(), state["level"].encode())
        return True

    def _let_go(self, id: CheckpointId) -> None:
        """Rank 0 cannot be asked: its disk must not be filled with what waits for it. Raises VoidError."""
        newer = sum(other > id for other in self._undecided)
        if newer < _MOST_UNDECIDED or id not in self._undecided:  # an agent before this one may have told rank 0 of it
            return
        reason = f"cannot reach rank 0, and {newer} newer checkpoints are waiting"
        if self.answers.take_back(id, f"rank {self.owner.rank}: {reason}"):
            raise VoidError(reason, rank=self.owner.rank, is_ended=True)

    def _recall(self) -> None:
        """What an agent of this start before this one knew: what is whole, and on its way to the shared place."""
        if self._has_recalled:
            return
        for id in reversed(cached.readable_steps(self.paths)):
            if id.lineage == self._lineage and files.exists(self.paths.manifest(id)) and id not in self._whole:
                self._add_whole(id)
                self._pass_on(id)
        self._has_recalled = True

    def _note_whole(self, pending: Pending) -> None:
        id, record = pending.id, pending.record
        self._undecided.discard(id)
        self._recall()
        self._add_whole(id)
        self._pass_on(id)
        started = pending.written_at or time.monotonic()
        nbytes, is_suspect = (record.nbytes, record.suspect is not None) if record is not None else (0, False)
        self.note_commit(pending, nbytes, started, is_suspect=is_suspect)

    def _add_whole(self, id: CheckpointId) -> None:
        self._whole = sorted({*self._whole, id})
        self.answers.newest = self._whole[-1].directory
        self.on_newest(self._whole[-1])

    def _pass_on(self, id: CheckpointId) -> None:
        """To the shared place, if it is to go there; again if that was broken off."""
        level, is_flushed = self.decisions.level(id), False
        with contextlib.suppress(OSError, DamagedError):  # a disk that cannot be read: the flusher looks where it goes
            is_flushed = cached.is_flushed(self.paths, id, [self.owner.rank])
        if level is not None and level.flush and not is_flushed:
            self.on_whole(id)

    def has_newer(self, id: CheckpointId) -> bool:
        """Whether a newer one is whole."""
        return any(other > id for other in self._whole)

    def why_degraded(self, id: CheckpointId) -> str | None:
        """Which ranks have no protection, and why."""
        level = self.decisions.level(id)
        return None if level is None else level.why_degraded

    def _withdraw(self, id: CheckpointId) -> None:
        """Rank 0 ended it: this rank's bytes go now, or, where a disk takes no change, when newer ones are whole."""
        try:
            for path in cache_retention.withdrawn(self.paths, id, self.owner.rank, self.redundancy.duties.copies):
                put_away(path, self.shelf.spare)
        except (OSError, StepwellError) as error:
            self.log.emit(run_events.PruneFailed(directory=id.directory, error=str(error)))
        with contextlib.suppress(OSError, StepwellError):  # the sweep of the shared place is the next chance
            self.spill.withdraw(id)

    # -- after a restart ----------------------------------------------------------------------------------------------

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
        self.redundancy.protect(id)
        if not self.redundancy.is_over(id):
            return False
        if self.redundancy.is_done(id):
            self._add_whole(id)
        return True

    def _rehold_part(self, id: CheckpointId) -> None:
        for rank in self.orders.one_of_each_node():
            is_here = rank == self.owner.rank
            found = cached.describe(self.paths, id, self.orders.run) if is_here else self.peers.shards(rank, id)
            if found is None:
                continue
            is_held = files.is_directory(self.paths.checkpoint(id)) or id in self.spill.held
            if found["decision"] is not None and is_held:
                self.decisions.keep(id, *(text.encode() for text in found["decision"]))
            for item in cached.load_held(found["shards"]):
                if item.rank == self.owner.rank and item.is_whole and not is_here:
                    copy_shard(self.peers.peer(rank), self.paths, id, self.orders.run, item)
        if assemble.find_record(self.paths, id, self.owner) is None:
            self.spill.recall(id)

    # -- room ---------------------------------------------------------------------------------------------------------

    def prune(self, lineage: int, keep: Keep) -> bool:
        """Remove from this node's cache what newer whole checkpoints make needless. The lowest rank of a node does."""
        is_clean = True
        rank, level = self.owner.rank, self.decisions.level
        if self._whole and self.orders.here(rank)[0] == rank:
            for id in cache_retention.surplus(self.paths, self.orders, rank, self._whole, level):
                try:
                    retention.remove_checkpoint(id, self.paths.checkpoint(id), self.shelf.spare)
                except (OSError, StepwellError) as error:
                    is_clean = False
                    self.log.emit(run_events.PruneFailed(directory=id.directory, error=str(error)))
        oldest = self._whole[-self.orders.keep] if len(self._whole) >= self.orders.keep else None
        if oldest is not None:
            self.spill.withdraw_older(oldest, self.decisions.level)
        self.spill.prune_committed()
        self._forget()
        return is_clean

    def _forget(self) -> None:
        """What was removed needs no memory."""
        there = {*cached.readable_steps(self.paths), *self.spill.held}
        self._whole = [id for id in self._whole if id in there] or self._whole[-1:]
        self.answers.newest = self._whole[-1].directory if self._whole else ""
        self.redundancy.keep_only(there)
        self.answers.keep_only(there)

    def sweep(self, lineage: int) -> bool:
        """Remove what agents that died left under temporary names."""
        self._recall()
        for id in cached.steps(self.paths):
            commit.sweep(self.paths.checkpoint(id), self.owner)
        for path in cache_retention.left_over(self.paths, lineage):
            files.remove(path)
        for name in files.list_names(self.paths.root):
            if is_left_over(name, lineage):
                files.remove(self.paths.root / name)
        return True

    def close(self) -> None:
        """No more checkpoints."""
        super().close()
        self.peers.close()
