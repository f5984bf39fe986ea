"""The order in which a checkpoint begins to exist. Every line here has a crash test.

Owns:    shards durable -> record durable -> manifest durable and visible.
Before:  the agent wrote the shard files (`agent/files`).   After: retention may remove an older checkpoint.
Holds:   a manifest names only durable records, a record only durable files; a manifest is never replaced, and where
         one is, no file takes the place of another, whoever asks.
"""

from __future__ import annotations

from pathlib import Path

from stepwell.errors import FencedError, PersistError, StorageError
from stepwell.faults import crash_point
from stepwell.storage.format.manifest import Manifest
from stepwell.storage.format.record import Record
from stepwell.storage.format.summary import Summary
from stepwell.storage.store import files
from stepwell.storage.store.lineage import newest_number, read_history
from stepwell.storage.store.objects import Location
from stepwell.storage.store.paths import RunPaths
from stepwell.types import CheckpointId, Owner


def open_checkpoint(paths: RunPaths, id: CheckpointId, owner: Owner, *, is_first_try: bool = False) -> Location:
    """Make the checkpoint's directory. It is no checkpoint yet.

    is_first_try:  nothing of an agent of this rank that died can be there
    Raises FencedError if the run moved on, PersistError if it is committed.
    """
    check_fence(paths, id)
    directory = paths.checkpoint(id)
    check_uncommitted(directory)
    files.make_directory(directory, is_synced=owner.is_leader)  # its name is durable before the manifest is
    if not is_first_try:
        sweep(directory, owner)
    return directory


def sweep(directory: Location, owner: Owner) -> None:
    """Remove temporary files of an agent that died here: a rank has one writer at a time."""
    mine = (f"{owner.stem}.", "manifest.", "void.") if owner.is_leader else (f"{owner.stem}.",)
    for name in files.list_names(directory):
        if name.endswith(files.TEMPORARY) and name.startswith(mine):
            files.remove(directory / name)


def check_fence(paths: RunPaths, id: CheckpointId) -> None:
    """Raise FencedError if somebody else continued this run from an earlier point, StorageError if the run is away.

    A snapshot that a successor already built upon (it restored it from memory) lies on the path and may still be
    committed by the agent of its dead trainer.
    """
    history = read_history(paths)
    is_live = history.is_live(id)
    newest = history.newest if history.damage is None else newest_number(paths)  # it may be away since it was listed
    if newest < id.lineage:  # no other owner: not even our own lineage is there
        raise StorageError(
            f"{paths.root}: lineage {id.lineage} of this run is not there: the directory was moved, is not mounted, or "
            "is another one; bring it back, and writing goes on",
            path=str(paths.root),
        )
    if not is_live:
        raise FencedError(
            f"lineage {history.newest} continues this run; {id} may not be committed",
            lineage=id.lineage,
            newest=history.newest,
        )


def check_uncommitted(directory: Location) -> None:
    """Raise PersistError where there is a manifest: what it names is never written again."""
    if files.exists(directory / "manifest.json"):
        raise PersistError(
            f"{directory}: this checkpoint is committed, and nothing is written into it again; save under a new id",
            directory=directory.name,
        )


def is_committed(paths: RunPaths, id: CheckpointId) -> bool:
    """Whether it exists. On True its name is durable: who linked it may have died right before that."""
    if not files.exists(paths.manifest(id)):
        return False
    files.sync_directory(paths.checkpoint(id))
    return True


def was_committed(paths: RunPaths, id: CheckpointId, owner: Owner) -> bool:
    """Whether an earlier agent of this lineage committed it. On True its name is durable."""
    if not is_committed(paths, id):
        return False
    sweep(paths.checkpoint(id), owner)
    return True


def publish_file(temporary: Path, final: Path, *, is_same: bool = False) -> None:
    """A synced temporary file becomes part of the checkpoint.

    is_same:  its bytes were compared with the record: it may take the place of a damaged file. Else PersistError
    """
    if not is_same and files.exists(final):
        check_uncommitted(final.parent)
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


def publish_record(paths: RunPaths, record: Record) -> Summary:
    """Write the record of a rank that is alone. Raises PersistError if the checkpoint is committed."""
    check_uncommitted(paths.checkpoint(record.id))
    data = record.dump()
    files.put(paths.checkpoint(record.id) / record_name(record.owner), data, point="record")
    return Summary.of(record, data)


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
