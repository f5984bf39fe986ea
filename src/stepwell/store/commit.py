"""The order in which a checkpoint begins to exist. Every line here has a crash test.

Owns:    shards durable -> record durable -> manifest durable and visible.
Before:  the agent wrote the shard files through `ShardFile`.   After: retention may remove an older checkpoint.
Holds:   a manifest names only durable records, a record only durable files; a manifest is never replaced.
"""

from __future__ import annotations

from pathlib import Path

from stepwell.errors import FencedError
from stepwell.faults import crash_point
from stepwell.format.checksum import document_digest
from stepwell.format.manifest import Manifest, RecordRef
from stepwell.format.record import Record
from stepwell.store import files
from stepwell.store.lineage import read_history
from stepwell.store.objects import Location
from stepwell.store.paths import RunPaths
from stepwell.types import CheckpointId, Owner


def open_checkpoint(paths: RunPaths, id: CheckpointId, owner: Owner) -> Location:
    """Make the checkpoint's directory. It is no checkpoint yet. Raises FencedError if the run moved on."""
    check_fence(paths, id)
    directory = paths.checkpoint(id)
    files.make_directory(directory)
    sweep(directory, owner)
    return directory


def sweep(directory: Location, owner: Owner) -> None:
    """Remove temporary files of an agent that died here: a rank has one writer at a time."""
    mine = (f"{owner.stem}.", "manifest.", "void.") if owner.is_leader else (f"{owner.stem}.",)
    for name in files.list_names(directory):
        if name.endswith(files.TEMPORARY) and name.startswith(mine):
            files.remove(directory / name)


def check_fence(paths: RunPaths, id: CheckpointId) -> None:
    """Raise FencedError if somebody else continued this run from an earlier point.

    A snapshot that a successor already built upon (it restored it from memory) lies on the path and may still be
    committed by the agent of its dead trainer.
    """
    history = read_history(paths)
    if not history.is_live(id):
        raise FencedError(
            f"lineage {history.newest} continues this run; {id} may not be committed",
            lineage=id.lineage,
            newest=history.newest,
        )


def was_committed(paths: RunPaths, id: CheckpointId, owner: Owner) -> bool:
    """Whether an earlier agent of this lineage committed it. On True its name is durable."""
    if not files.exists(paths.manifest(id)):
        return False
    sweep(paths.checkpoint(id), owner)
    files.sync_directory(paths.checkpoint(id))  # that agent may have died right before this
    return True


def publish_file(temporary: Path, final: Path) -> None:
    """A synced temporary file becomes part of the checkpoint."""
    files.rename(temporary, final)
    crash_point("shard.renamed")
    files.sync_directory(final.parent)
    crash_point("shard.durable")


def share_file(source: Location, final: Location) -> bool:
    """Store an unchanged file without writing it again. False where that cannot be done."""
    try:
        files.share(source, final)
    except OSError:
        return False
    files.sync_directory(final.parent)
    return True


def publish_record(paths: RunPaths, record: Record) -> RecordRef:
    """Write the record of one rank."""
    data, name = record.dump(), record_name(record.owner)
    files.put(paths.checkpoint(record.id) / name, data, point="record")
    return RecordRef(name, len(data), document_digest(data))


def record_name(owner: Owner) -> str:
    """Name of a rank's record."""
    return f"{owner.stem}.json"


def publish_manifest(paths: RunPaths, manifest: Manifest) -> None:
    """Let the checkpoint exist. On return it is durable.

    A name that is already there was linked by an earlier agent of this very lineage, for the same snapshot.
    """
    check_fence(paths, manifest.id)
    files.put_new(paths.manifest(manifest.id), manifest.dump(), point="manifest")
    crash_point("manifest.durable")
