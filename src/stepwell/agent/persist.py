"""One complete snapshot's way to a committed checkpoint, in the order of the design; then retention.

Before:  queue picked a complete snapshot.   After: the trainer is told.
Holds:   the order shard, record, manifest, prune. A failure leaves older checkpoints untouched.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from stepwell import events, journal
from stepwell.agent.queue import Pending
from stepwell.agent.writer import copy_file, digest_image, write_image
from stepwell.arena.memory import FROZEN
from stepwell.errors import StepwellError
from stepwell.faults import crash_point
from stepwell.format.checksum import BLOCK_BYTES
from stepwell.format.manifest import Manifest
from stepwell.format.record import FileEntry, Record, check_file_name
from stepwell.store import catalog, commit, files, retention
from stepwell.store.lineage import newest_number
from stepwell.store.paths import RunPaths
from stepwell.types import Keep


class Persister:
    """Writes snapshots of one run. Remembers the last frozen file, to store it by reference while unchanged."""

    def __init__(self, paths: RunPaths, log: journal.EventLog) -> None:
        self.paths = paths
        self.log = log
        self._frozen: tuple[tuple[int, int], Path, FileEntry] | None = None

    def persist(self, pending: Pending) -> None:
        """Make a snapshot durable and visible. Raises OSError or FencedError; older checkpoints stay as they are."""
        started = time.monotonic()
        crash_point("persist.begin")
        if commit.was_committed(self.paths, pending.id):
            # By an agent that died before it could say so: its files are not touched again.
            nbytes = pending.layout.nbytes + pending.layout.frozen_bytes
            self._note_commit(pending, nbytes, started, is_suspect=pending.suspect() is not None)
            return
        directory = commit.open_checkpoint(self.paths, pending.id)
        entries = [self._write_live(pending, directory)]
        if pending.layout.frozen_bytes:
            entries.append(self._write_frozen(pending, directory))
        self.finish(pending, entries, started)

    def finish(self, pending: Pending, entries: list[FileEntry], started: float) -> None:
        """The state's files are durable: add the user's own, then commit."""
        directory = self.paths.checkpoint(pending.id)
        entries += [self._attach(pending, directory, *item) for item in sorted(pending.meta["files"].items())]
        written = time.monotonic()
        record = make_record(pending, entries)
        self.log.emit(events.Persist(step=pending.id.step, nbytes=record.nbytes, seconds=written - started))
        manifest = self.commit(pending, record)
        self._note_commit(pending, record.nbytes, started, is_suspect=manifest.suspect is not None)

    def _note_commit(self, pending: Pending, nbytes: int, started: float, *, is_suspect: bool) -> None:
        self.log.emit(
            events.Commit(
                step=pending.id.step,
                directory=pending.id.directory,
                nbytes=nbytes,
                seconds=time.monotonic() - started,
                suspect=is_suspect,
            )
        )

    def commit(self, pending: Pending, record: Record) -> Manifest:
        """Record, then manifest: the point where the checkpoint begins to exist."""
        reference = commit.publish_record(self.paths, record)
        meta = pending.meta
        manifest = Manifest(
            run=record.run,
            id=record.id,
            world_size=record.owner.world_size,
            created=record.created,
            records=(reference,),
            nbytes=record.nbytes,
            suspect=record.suspect,
            epoch_end=meta["epoch_end"],
            finished=meta["finished"],
            name=meta["name"],
        )
        commit.publish_manifest(self.paths, manifest)
        pending.record = record
        return manifest

    def _write_live(self, pending: Pending, directory: Path) -> FileEntry:
        name, nbytes = f"{pending.owner.stem}.safetensors", pending.layout.nbytes
        temporary = directory / f"{name}{files.TEMPORARY}"
        image = pending.arena.image(pending.slot, pending.arena.shape.slot_bytes)
        blocks = write_image(temporary, image, nbytes)
        commit.publish_file(temporary, directory / name)
        return FileEntry(name, "safetensors", nbytes, BLOCK_BYTES, blocks)

    def _write_frozen(self, pending: Pending, directory: Path) -> FileEntry:
        name, nbytes = f"{pending.owner.stem}.frozen.safetensors", pending.layout.frozen_bytes
        key = (pending.arena.shape.generation, pending.meta["frozen"])
        if self._frozen is not None and self._frozen[0] == key and commit.link_file(self._frozen[1], directory / name):
            self._frozen = (key, directory / name, self._frozen[2])
            return self._frozen[2]
        temporary = directory / f"{name}{files.TEMPORARY}"
        image = pending.arena.image(FROZEN, pending.arena.shape.frozen_bytes)
        entry = FileEntry(name, "safetensors", nbytes, BLOCK_BYTES, write_image(temporary, image, nbytes))
        commit.publish_file(temporary, directory / name)
        self._frozen = (key, directory / name, entry)
        return entry

    def _attach(self, pending: Pending, directory: Path, name: str, source: str) -> FileEntry:
        final = check_file_name(f"{pending.owner.stem}.file.{name}", path=source)
        temporary = directory / f"{final}{files.TEMPORARY}"
        nbytes, blocks = copy_file(Path(source), temporary)
        commit.publish_file(temporary, directory / final)
        return FileEntry(final, "opaque", nbytes, BLOCK_BYTES, blocks)

    def prune(self, lineage: int, keep: Keep) -> None:
        """Apply retention. Only the owner of the newest lineage may remove anything."""
        self._remove(lineage, retention.surplus(catalog.scan(self.paths), keep))
        self.sweep(lineage)

    def sweep(self, lineage: int) -> None:
        """Remove what processes that died left behind. Only the owner of the newest lineage may."""
        entries = catalog.scan(self.paths)
        self._remove(lineage, [(entry, "never committed") for entry in retention.left_over(entries, lineage)])
        if newest_number(self.paths) == lineage:
            retention.remove_strays(self.paths, entries, lineage)

    def _remove(self, lineage: int, entries: Sequence[tuple[catalog.Entry, str]]) -> None:
        for entry, reason in entries:
            if newest_number(self.paths) != lineage:
                return
            try:
                if entry.is_committed:
                    retention.remove_checkpoint(entry)
                else:
                    retention.remove_directory(entry)
                self.log.emit(events.Prune(directory=entry.id.directory, reason=reason))
            except (OSError, StepwellError) as error:
                self.log.emit(events.PruneFailed(directory=entry.id.directory, error=str(error)))


def make_record(pending: Pending, entries: list[FileEntry]) -> Record:
    """The record of a snapshot, from what the trainer said and what was written."""
    return Record(
        run=pending.run,
        id=pending.id,
        owner=pending.owner,
        created=pending.meta["created"],
        files=tuple(entries),
        leaves=pending.layout.leaves,
        tree=pending.meta["tree"],
        suspect=pending.suspect(),
        versions=pending.layout.versions,
    )


def record_in_memory(pending: Pending) -> Record:
    """The record of a snapshot that lies in the arena, with checksums, whether it was written or not."""
    if pending.record is None:
        stem, layout = pending.owner.stem, pending.layout
        image = pending.arena.image(pending.slot, pending.arena.shape.slot_bytes)
        entries = [
            FileEntry(
                f"{stem}.safetensors", "safetensors", layout.nbytes, BLOCK_BYTES, digest_image(image, layout.nbytes)
            )
        ]
        if layout.frozen_bytes:
            frozen = pending.arena.image(FROZEN, pending.arena.shape.frozen_bytes)
            blocks = digest_image(frozen, layout.frozen_bytes)
            name = f"{stem}.frozen.safetensors"
            entries.append(FileEntry(name, "safetensors", layout.frozen_bytes, BLOCK_BYTES, blocks))
        pending.record = make_record(pending, entries)
    return replace(pending.record, files=tuple(file for file in pending.record.files if file.kind != "opaque"))
