"""One commit for all ranks, through the store alone.

Owns:    what a rank leaves for the leader (a record, or a word why there is none), and how the leader ends it: by the
         manifest, or by `void.json`.
Before:  each rank's files are durable.   After: the checkpoint exists, or never will.
Holds:   a record is never replaced once it is there, so a manifest names what it will always name; a rank that is lost
         leaves older checkpoints in force.
"""

from __future__ import annotations

from collections.abc import Mapping

from stepwell.errors import DamagedError, VoidError
from stepwell.format.checksum import document_digest
from stepwell.format.manifest import RecordRef, Void
from stepwell.format.record import Record
from stepwell.store import catalog, files
from stepwell.store.commit import check_fence, record_name
from stepwell.store.objects import Location
from stepwell.store.paths import RunPaths
from stepwell.store.spare import Spare
from stepwell.types import CheckpointId, Owner

_MAX_VOID_BYTES = 64 << 10


def leave_record(paths: RunPaths, record: Record) -> Record:
    """Leave this rank's record for the leader. One that an earlier agent left stays, and is returned."""
    path = paths.checkpoint(record.id) / record_name(record.owner)
    files.put_new(path, record.dump(), point="record")
    return Record.load(files.get(path), path=str(path))


def find_record(paths: RunPaths, id: CheckpointId, owner: Owner) -> Record | None:
    """The record that an earlier agent of this rank left."""
    path = paths.checkpoint(id) / record_name(owner)
    return Record.load(files.get(path), path=str(path)) if files.exists(path) else None


def leave_void(paths: RunPaths, void: Void) -> None:
    """Say that this rank has no part in a checkpoint; the leader ends it with that. FencedError if the run moved on."""
    check_fence(paths, void.id)
    files.make_directory(paths.checkpoint(void.id))
    files.put_new(void_path(paths, void), void.dump(), point="void")
    if Owner(void.rank).is_leader:
        end_void(paths, void)  # it looks after this one no more, and the others wait for its word


def void_path(paths: RunPaths, void: Void) -> Location:
    """Where a rank leaves its word."""
    return paths.checkpoint(void.id) / f"{Owner(void.rank).stem}.void"


def gather(paths: RunPaths, id: CheckpointId, world_size: int) -> list[tuple[Record, RecordRef]] | list[int]:
    """The leader looks: all records, or the ranks that are missing. Raises VoidError if one gave up."""
    directory = paths.checkpoint(id)
    names = set(files.list_names(directory))
    if paths.void(id).name in names:  # by a leader's agent before this one: the others have seen it
        raise VoidError(say(paths.void(id)))
    for rank in range(world_size):
        name = f"{Owner(rank).stem}.void"
        if name in names:
            raise VoidError(say(directory / name), rank=rank)
    owners = [Owner(rank, world_size) for rank in range(world_size)]
    missing = [owner.rank for owner in owners if record_name(owner) not in names]
    if missing:
        return missing
    found = [_read(paths, id, owner) for owner in owners]
    check_copies({record.owner.rank: record.copies for record, _ in found})
    return found


def check_copies(copies: Mapping[int, Mapping[str, str]]) -> None:
    """What several ranks hold and each stores a part of has to be the same on all of them. Raises VoidError."""
    known: dict[str, tuple[int, str]] = {}
    for rank, digests in copies.items():
        for ranks, digest in digests.items():
            first, expected = known.setdefault(ranks, (rank, digest))
            if digest != expected:
                raise VoidError(
                    f"rank {rank}: tensors that were the same on ranks {ranks} differ from those of rank {first}",
                    rank=rank,
                    is_drift=True,
                )


def _read(paths: RunPaths, id: CheckpointId, owner: Owner) -> tuple[Record, RecordRef]:
    path = paths.checkpoint(id) / record_name(owner)
    try:
        data = files.get(path)
        record = Record.load(data, path=str(path))
    except DamagedError as error:  # it is never replaced, so it never gets better
        raise VoidError(str(error), rank=owner.rank) from error
    if record.id != id or record.owner != owner:
        found = f"{record.id}, rank {record.owner.rank} of {record.owner.world_size}"
        raise VoidError(f"{path}: belongs to {found}", rank=owner.rank)
    return record, RecordRef(path.name, len(data), document_digest(data))


def end_void(paths: RunPaths, void: Void) -> None:
    """The leader ends it: the others see that and let go."""
    check_fence(paths, void.id)
    files.put_new(paths.void(void.id), void.dump(), point="void")


def check_void(paths: RunPaths, id: CheckpointId) -> None:
    """A rank is about to write its part. Raises VoidError if there will be no manifest."""
    if is_ended(paths, id):
        raise VoidError(say(paths.void(id)))


def check_waiting(paths: RunPaths, id: CheckpointId) -> None:
    """A rank that is not the leader looks, its part is there. Raises VoidError if there will be no manifest."""
    check_void(paths, id)
    if not files.is_directory(paths.checkpoint(id)):
        raise VoidError(f"{id} was given up and removed")


def is_ended(paths: RunPaths, id: CheckpointId) -> bool:
    """Whether the leader said that there will be no manifest."""
    return files.exists(paths.void(id))


def is_outdated(paths: RunPaths, id: CheckpointId) -> bool:
    """Whether it is gone and a newer one is there: it was removed to make room, before this rank looked."""
    if files.is_directory(paths.checkpoint(id)):
        return False
    return any(entry.is_live and entry.is_committed and entry.id > id for entry in catalog.scan(paths))


def withdraw(paths: RunPaths, id: CheckpointId, owner: Owner, spare: Spare | None) -> None:
    """The leader ended it: this rank's bytes go at once, or each further try would leave a whole state on the disk.

    What does not change stays, under the name by which the next checkpoint links it.
    """
    directory = paths.checkpoint(id)
    for name in files.list_names(directory):
        is_mine = name.startswith(f"{owner.stem}.") and not name.endswith((".void", ".frozen.safetensors"))
        if is_mine and (spare is None or not spare.keep(directory / name)):
            files.remove(directory / name)


def say(path: Location) -> str:
    """Why a checkpoint is void, from the word that was left."""
    try:
        void = Void.load(files.get(path, limit=_MAX_VOID_BYTES), path=str(path))
        return f"rank {void.rank}: {void.reason}"
    except DamagedError as error:
        return f"void, and the reason cannot be read: {error}"
