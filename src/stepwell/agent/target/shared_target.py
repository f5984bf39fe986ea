"""One snapshot's way to a committed checkpoint, in the order of the design; then retention.

Before:  queue picked a snapshot, complete or about to be.   After: the trainer is told.
Holds:   the order shard, record, manifest, prune. No name but a temporary one before the snapshot is complete. A
         failure leaves older checkpoints untouched.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from stepwell.agent.files.sink import shelf_of
from stepwell.agent.files.upload import UploadImage
from stepwell.agent.files.writer import Writer, digest_image
from stepwell.agent.pending import AbandonedError, Pending
from stepwell.errors import StepwellError, VoidError
from stepwell.events import journal, run_events
from stepwell.faults import crash_point
from stepwell.handover.memory import FROZEN
from stepwell.storage.chain.chain_files import remove_orphans
from stepwell.storage.format.checksum import BLOCK_BYTES, PART_BYTES
from stepwell.storage.format.manifest import Void
from stepwell.storage.format.record import FileEntry, Record, check_file_name
from stepwell.storage.format.summary import Summary
from stepwell.storage.store import assemble, catalog, commit, files, retention
from stepwell.storage.store.lineage import newest_number
from stepwell.storage.store.objects import Location
from stepwell.storage.store.paths import RunPaths
from stepwell.types import CheckpointId, Keep, Owner

MANY_RANKS: Final = 64
"""Up to so many, each looks for the others' parts as if it were alone."""
_LOOKS_PER_SECOND: Final = 2_000
"""Of all ranks together, where there are more."""
_FENCE_SECONDS: Final = 1.0
"""For so long a rank that waits for the leader does not look who owns the run."""
_MOST_SENT_AGAIN: Final = 8
"""Snapshots that a trainer tells a new agent of: the one before may have left something of them."""


class Persister:
    """Writes snapshots of one run. Remembers the last frozen file, to store it by reference while unchanged."""

    @property
    def may_prune(self) -> bool:
        """Whether this rank removes what is old."""
        return self.paths.rank == 0

    def __init__(
        self,
        paths: RunPaths,
        log: journal.EventLog,
        writer: Writer | None = None,
        *,
        lineage: int,
        patience: float = 600.0,
    ) -> None:
        self.paths = paths
        self.log = log
        self.shelf = shelf_of(paths, Writer() if writer is None else writer, lineage)
        self._frozen: tuple[tuple[int, int], Location, FileEntry] | None = None
        self._opened = 0
        self.patience = patience

    def persist(self, pending: Pending) -> bool:
        """Make a snapshot durable and visible. Raises OSError or FencedError; older checkpoints stay as they are.

        One that is not complete yet is written as its bytes arrive. Raises AbandonedError, with nothing left, if it
        comes to nothing. False: this rank's part is durable, and `follow` tells when the others' are.
        """
        started = time.monotonic()
        crash_point("persist.begin")
        if commit.was_committed(self.paths, pending.id, pending.owner):
            # By an agent that died before it could say so: its files are not touched again.
            nbytes = pending.layout.nbytes + pending.layout.frozen_bytes
            self.note_commit(pending, nbytes, started, is_suspect=pending.suspect() is not None)
            return True
        directory = self.open(pending)
        if not pending.owner.is_alone:
            assemble.check_void(self.paths, pending.id)
            pending.record = assemble.resume_record(self.paths, pending.id, pending.owner)
            if pending.record is not None:  # as above, and the leader may be reading it
                return False
        try:
            entries = self.write(pending, directory)
        except AbandonedError:
            with contextlib.suppress(OSError):  # not empty: an agent that died here before us left something
                files.remove_directory(directory)
            raise
        return self.finish(pending, entries, started)

    def fall_back(self, error: OSError) -> Persister:
        """Who takes what cannot be written here. Raises the error if there is nobody."""
        raise error

    def open(self, pending: Pending) -> Location:
        """Make the checkpoint's directory. Raises FencedError if the run moved on."""
        self._opened += 1
        is_first_try = self._opened > _MOST_SENT_AGAIN and not pending.failures
        return commit.open_checkpoint(self.paths, pending.id, pending.owner, is_first_try=is_first_try)

    def write(self, pending: Pending, directory: Location) -> list[FileEntry]:
        """The files of the state, each durable under its name. Raises AbandonedError if it comes to nothing."""
        entries = [self._write_live(pending, directory)]
        if pending.layout.frozen_bytes:
            entries.append(self._write_frozen(pending, directory))
        return entries

    def finish(self, pending: Pending, entries: list[FileEntry], started: float) -> bool:
        """The state's files are durable: add the user's own, then commit, or leave that to the leader."""
        directory = self.paths.checkpoint(pending.id)
        entries += [self._attach(pending, directory, *item) for item in sorted(pending.request.files.items())]
        written = time.monotonic()
        record = make_record(pending, entries)
        self.log.emit(run_events.Persist(step=pending.id.step, nbytes=record.nbytes, seconds=written - started))
        return self.settle(pending, record, started)

    def settle(self, pending: Pending, record: Record, started: float) -> bool:
        """All files are durable: the record, and alone the manifest too."""
        if not pending.owner.is_alone:
            pending.record = assemble.leave_record(self.paths, record)
            return False
        self.commit(pending, [commit.publish_record(self.paths, record)])
        pending.record = record
        self.note_commit(pending, record.nbytes, started, is_suspect=record.suspect is not None)
        return True

    def pause(self, world_size: int, waited: float) -> float:
        """Seconds from one look for the parts of other ranks to the next."""
        first, most = self.shelf.looks
        pause = first + waited / 10
        if world_size > MANY_RANKS:  # each look is a few requests to one file server, by every rank
            least = world_size / _LOOKS_PER_SECOND
            pause, most = max(pause, least + waited / 4), max(most, 2 * least)
        return min(most, pause)

    def follow(self, pending: Pending) -> bool:
        """Whether a checkpoint of many ranks is committed; the leader does that when all records are there.

        Raises VoidError if it came to nothing, or FencedError.
        """
        try:
            return self._follow(pending)
        except VoidError:
            if assemble.is_ended(self.paths, pending.id):  # without the leader's word it may still be committing this
                assemble.withdraw(self.paths, pending.id, pending.owner, self.shelf.spare)
            raise

    def _follow(self, pending: Pending) -> bool:
        paths, id, owner = self.paths, pending.id, pending.owner
        assert pending.written_at is not None
        if pending.record is None:  # an agent before this one wrote it
            pending.record = assemble.find_record(paths, id, owner)
        waited = time.monotonic() - pending.written_at
        if not commit.is_committed(paths, id):
            if not owner.is_leader:
                assemble.check_void(paths, id)
                if not files.is_directory(paths.checkpoint(id)):
                    if pending.request.name is None and assemble.is_outdated(paths, id):
                        return True
                    assemble.check_waiting(paths, id)
                if waited > _FENCE_SECONDS:
                    commit.check_fence(paths, id)
                if waited > 2 * self.patience:
                    raise VoidError(f"the leader did not finish {id} within {waited:.0f} s")
                return False
            summaries = self._gather(pending, waited)
            if not summaries:
                return False
            self.commit(pending, summaries)
        record = pending.record
        nbytes, is_suspect = (record.nbytes, record.suspect is not None) if record is not None else (0, False)
        self.note_commit(pending, nbytes, pending.written_at, is_suspect=is_suspect)
        return True

    def _gather(self, pending: Pending, waited: float) -> list[Summary]:
        """Of all records, or of none yet. What came to nothing is ended for all ranks. Raises VoidError."""
        world_size = pending.owner.world_size
        try:
            found = assemble.gather(self.paths, pending.id, world_size)
            if found[0] == pending.owner.rank:  # or the shared place was away for a moment
                commit.check_fence(self.paths, pending.id)
                found = assemble.gather(self.paths, pending.id, world_size)
            if found[0] == pending.owner.rank:
                raise VoidError(f"{pending.id} was removed while waiting for its parts", rank=pending.owner.rank)
            if isinstance(found[0], int) and waited > self.patience:
                ranks = ", ".join(map(str, found[:8]))
                raise VoidError(f"no part of rank {ranks} within {waited:.0f} s", rank=found[0])
        except VoidError as error:
            rank = error.fields.get("rank", 0)
            reason = str(error).removeprefix(f"rank {rank}: ")
            with contextlib.suppress(FileNotFoundError):  # its directory is gone, which tells the others the same
                assemble.end_void(self.paths, Void(pending.run, pending.id, int(str(rank)), reason))
            raise
        commit.check_fence(self.paths, pending.id)
        summaries = [item for item in found if not isinstance(item, int)]
        if summaries:
            crash_point("records.gathered")
        return summaries

    def why_degraded(self, id: CheckpointId) -> str | None:
        """Why a committed checkpoint is less safe than it was to be."""
        return None

    def void(self, void: Void) -> None:
        """This rank has no part in a checkpoint: let the leader know."""
        assemble.leave_void(self.paths, void)
        self.log.emit(run_events.PersistFailed(step=void.id.step, error=void.reason, action="void for all ranks"))

    def note_commit(self, pending: Pending, nbytes: int, started: float, *, is_suspect: bool) -> None:
        self.log.emit(
            run_events.Commit(
                step=pending.id.step,
                directory=pending.id.directory,
                nbytes=nbytes,
                seconds=time.monotonic() - started,
                suspect=is_suspect,
            )
        )

    def commit(self, pending: Pending, summaries: Sequence[Summary]) -> None:
        """The manifest: the point where the checkpoint begins to exist."""
        said = {key: getattr(pending.request, key) for key in ("epoch_end", "finished", "name")}
        commit.publish_manifest(self.paths, assemble.make_manifest(summaries, **said))

    def _write_live(self, pending: Pending, directory: Location) -> FileEntry:
        name, nbytes, grain = f"{pending.owner.stem}.safetensors", pending.layout.nbytes, block_bytes(pending.owner)
        memory = pending.arena.image(pending.slot, pending.arena.shape.slot_bytes)
        image = UploadImage(memory, nbytes, grain, pending.arrive, pending.wait_complete)
        blocks = self.shelf.put_image(directory / name, image)
        return FileEntry(name, "safetensors", nbytes, grain, blocks)

    def _write_frozen(self, pending: Pending, directory: Location) -> FileEntry:
        name, nbytes = f"{pending.owner.stem}.frozen.safetensors", pending.layout.frozen_bytes
        key = (pending.arena.shape.generation, pending.begin.frozen)
        if self._frozen is not None and self._frozen[0] == key and commit.share_file(self._frozen[1], directory / name):
            self._frozen = (key, directory / name, self._frozen[2])
            return self._frozen[2]
        memory, grain = pending.arena.image(FROZEN, pending.arena.shape.frozen_bytes), block_bytes(pending.owner)
        image = UploadImage(memory, nbytes, grain, lambda _: 0.0, pending.wait_complete)
        blocks = self.shelf.put_image(directory / name, image)
        entry = FileEntry(name, "safetensors", nbytes, grain, blocks)
        self._frozen = (key, directory / name, entry)
        return entry

    def remember(self) -> None:
        """If something was found out about the storage: say so."""
        if (news := self.shelf.news()) is not None:
            self.log.emit(news)

    def _attach(self, pending: Pending, directory: Location, name: str, source: str) -> FileEntry:
        final = check_file_name(f"{pending.owner.stem}.file.{name}", path=source)
        nbytes, blocks = self.shelf.put_file(Path(source), directory / final)
        return FileEntry(final, "opaque", nbytes, BLOCK_BYTES, blocks)

    def prune(self, lineage: int, keep: Keep) -> bool:
        """Apply retention. Only the owner of the newest lineage may remove anything. False if something failed."""
        is_clean = self._remove(lineage, retention.surplus(catalog.scan(self.paths), keep))
        return self.sweep(lineage) and is_clean

    def sweep(self, lineage: int) -> bool:
        """Remove what processes that died left behind. Only the owner of the newest lineage may."""
        entries = catalog.scan(self.paths)
        left = [(entry, "never committed") for entry in retention.left_over(entries, lineage)]
        is_clean = self._remove(lineage, left)
        if newest_number(self.paths) == lineage:
            retention.remove_strays(self.paths, entries, lineage)
            remove_orphans(self.paths)
        return is_clean

    def close(self) -> None:
        """No more checkpoints."""
        self.shelf.close()

    def _remove(self, lineage: int, entries: Sequence[tuple[catalog.Entry, str]]) -> bool:
        is_clean = True
        for entry, reason in entries:
            if newest_number(self.paths) != lineage:
                break
            try:
                if entry.is_committed:
                    retention.remove_checkpoint(entry.id, entry.path, self.shelf.spare)
                else:
                    retention.remove_directory(entry.path)
                self.log.emit(run_events.Prune(directory=entry.id.directory, reason=reason))
            except (OSError, StepwellError) as error:
                is_clean = False
                self.log.emit(run_events.PruneFailed(directory=entry.id.directory, error=str(error)))
        return is_clean


def block_bytes(owner: Owner) -> int:
    """How much of a rank's file shares a checksum."""
    return BLOCK_BYTES if owner.is_alone else PART_BYTES


def make_record(pending: Pending, entries: list[FileEntry]) -> Record:
    """The record of a snapshot, from what the trainer said and what was written."""
    return Record(
        run=pending.run,
        id=pending.id,
        owner=pending.owner,
        created=pending.request.created,
        files=tuple(entries),
        leaves=pending.layout.leaves,
        tree=pending.request.tree,
        suspect=pending.suspect(),
        versions=pending.layout.versions,
        copies=pending.begin.copies or {},
        elsewhere=pending.layout.elsewhere,
        partners=pending.layout.partners,
    )


def record_in_memory(pending: Pending) -> Record:
    """The record of a snapshot that lies in the arena, with checksums, whether it was written or not."""
    if pending.record is None:
        stem, layout, grain = pending.owner.stem, pending.layout, block_bytes(pending.owner)
        image = pending.arena.image(pending.slot, pending.arena.shape.slot_bytes)
        blocks = digest_image(image, layout.nbytes, grain)
        entries = [FileEntry(f"{stem}.safetensors", "safetensors", layout.nbytes, grain, blocks)]
        if layout.frozen_bytes:
            frozen = pending.arena.image(FROZEN, pending.arena.shape.frozen_bytes)
            blocks = digest_image(frozen, layout.frozen_bytes, grain)
            name = f"{stem}.frozen.safetensors"
            entries.append(FileEntry(name, "safetensors", layout.frozen_bytes, grain, blocks))
        pending.record = make_record(pending, entries)
    return replace(pending.record, files=tuple(file for file in pending.record.files if file.kind != "opaque"))
