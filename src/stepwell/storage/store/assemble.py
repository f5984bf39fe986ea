"""One commit for all ranks, through the store alone.

Owns:    what a rank leaves for the leader (a record and its summary, or a word why there is none), and how the leader
         ends it: by the manifest, or by `void.json`.
Before:  each rank's files are durable.   After: the checkpoint exists, or never will.
Holds:   a record is never replaced once it is there, so a manifest names what it will always name; a rank that is lost
         leaves older checkpoints in force.
"""

from __future__ import annotations

import contextlib
from collections.abc import Container, Mapping, Sequence
from typing import Any

from stepwell.errors import DamagedError, StorageError, VoidError
from stepwell.storage.format.manifest import Manifest, RecordRef, Void
from stepwell.storage.format.record import Record
from stepwell.storage.format.summary import MAX_SUMMARY_BYTES, Summary
from stepwell.storage.store import catalog, files
from stepwell.storage.store.commit import check_fence, record_name
from stepwell.storage.store.objects import Location
from stepwell.storage.store.parallel_reads import for_each
from stepwell.storage.store.paths import RunPaths
from stepwell.storage.store.spare import Spare, put_away
from stepwell.types import CheckpointId, Owner

_MAX_VOID_BYTES = 64 << 10


def leave_record(paths: RunPaths, record: Record) -> Record:
    """Leave this rank's record for the leader. One that an earlier agent left stays, and is returned."""
    path = paths.checkpoint(record.id) / record_name(record.owner)
    files.put_new(path, record.dump(), point="record")
    if (found := _sum_up(paths, record.id, record.owner)) is None:
        message = f"{path}: was written, and is gone: the directory was moved, or is not mounted"
        raise StorageError(message, path=str(path))
    return found


def resume_record(paths: RunPaths, id: CheckpointId, owner: Owner) -> Record | None:
    """The record that an earlier agent of this rank left for the leader, with its summary made again."""
    return _sum_up(paths, id, owner) if files.exists(paths.checkpoint(id) / record_name(owner)) else None


def find_record(paths: RunPaths, id: CheckpointId, owner: Owner) -> Record | None:
    """The record that a rank left."""
    path = paths.checkpoint(id) / record_name(owner)
    data = _get_if_there(path) if files.exists(path) else None
    return None if data is None else Record.load(data, path=str(path))


def _get_if_there(path: Location) -> bytes | None:
    """None where it is gone since it was listed: that is no damage, the shared place may be away for a moment."""
    try:
        return files.get(path)
    except DamagedError:
        return files.get(path) if files.exists(path) else None


def _sum_up(paths: RunPaths, id: CheckpointId, owner: Owner) -> Record | None:
    """A record that is there, and beside it what the leader needs of it: always of these very bytes."""
    path = paths.checkpoint(id) / record_name(owner)
    if (data := _get_if_there(path)) is None:
        return None
    record = Record.load(data, path=str(path))
    with contextlib.suppress(OSError):  # without it the leader reads the record
        files.put_hint(paths.checkpoint(id) / summary_name(owner), Summary.of(record, data).dump())
    return record


def summary_name(owner: Owner) -> str:
    """Name of the summary of a rank's record."""
    return f"{owner.stem}.summary"


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


def gather(paths: RunPaths, id: CheckpointId, world_size: int) -> list[Summary] | list[int]:
    """The leader looks: the summaries of all records, or the ranks that are missing. Raises VoidError if one gave up.

    What this reads grows with the ranks, not with their leaves.
    """
    directory = paths.checkpoint(id)
    names = set(files.list_names(directory))
    if paths.void(id).name in names:  # by a leader's agent before this one: the others have seen it
        raise VoidError(say(paths.void(id)))
    owners = [Owner(rank, world_size) for rank in range(world_size)]
    for owner in owners:
        name = f"{owner.stem}.void"
        if name in names:
            raise VoidError(say(directory / name), rank=owner.rank)
    missing = [owner.rank for owner in owners if record_name(owner) not in names]
    if missing:
        return missing
    read = for_each(owners, lambda owner: _read(paths, id, owner, names))
    if gone := [owner.rank for owner, item in zip(owners, read, strict=True) if item is None]:
        return gone
    found = [item for item in read if item is not None]
    check_copies({summary.owner.rank: summary.copies for summary in found})
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


def _read(paths: RunPaths, id: CheckpointId, owner: Owner, names: Container[str]) -> Summary | None:
    directory, hint = paths.checkpoint(id), summary_name(owner)
    path = directory / record_name(owner)
    summary = _read_hint(directory / hint) if hint in names else None
    if summary is None:  # its agent is about to write it, or the record was carried here by another one
        try:
            if (data := _get_if_there(path)) is None:
                return None
            summary = Summary.of(Record.load(data, path=str(path)), data)
        except DamagedError as error:  # it is never replaced, so it never gets better
            raise VoidError(str(error), rank=owner.rank) from error
    if summary.id != id or summary.owner != owner:
        found = f"{summary.id}, rank {summary.owner.rank} of {summary.owner.world_size}"
        raise VoidError(f"{path}: belongs to {found}", rank=owner.rank)
    return summary


def _read_hint(path: Location) -> Summary | None:
    """None: it was lost with power, or cannot be read. The record itself tells the same."""
    with contextlib.suppress(DamagedError):
        return Summary.load(files.get(path, limit=MAX_SUMMARY_BYTES), path=str(path))
    return None


def make_manifest(summaries: Sequence[Summary], **fields: Any) -> Manifest:
    """The manifest that names all these records. `fields`: what the trainer, or a tool, says of the checkpoint."""
    first = summaries[0]
    suspects = [summary.suspect for summary in summaries if summary.suspect is not None]
    return Manifest(
        run=first.run,
        id=first.id,
        world_size=len(summaries),
        created=first.created,
        records=tuple(RecordRef(record_name(one.owner), one.nbytes, one.digest) for one in summaries),
        nbytes=sum(summary.data_bytes for summary in summaries),
        suspect=suspects[0] if suspects else None,
        **fields,
    )


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
    if is_gone(paths, id):
        raise VoidError(f"{id} was given up and removed")


def is_gone(paths: RunPaths, id: CheckpointId) -> bool:
    """Whether it is not there any more. Raises StorageError if nothing of the run is, FencedError."""
    if files.is_directory(paths.checkpoint(id)):
        return False
    check_fence(paths, id)  # or the shared place was away for a moment
    return not files.is_directory(paths.checkpoint(id))


def is_ended(paths: RunPaths, id: CheckpointId) -> bool:
    """Whether the leader said that there will be no manifest."""
    return files.exists(paths.void(id))


def is_outdated(paths: RunPaths, id: CheckpointId) -> bool:
    """Whether it is gone and two newer ones are there: it was removed to make room, before this rank looked.

    With fewer of them it was not whole: the newest two good ones are never removed.
    """
    if files.is_directory(paths.checkpoint(id)):
        return False
    return sum(entry.is_live and entry.is_committed and entry.id > id for entry in catalog.scan(paths)) >= 2


def withdraw(paths: RunPaths, id: CheckpointId, owner: Owner, spare: Spare | None) -> None:
    """The leader ended it: this rank's bytes go at once, or each further try would leave a whole state on the disk.

    What does not change stays, under the name by which the next checkpoint links it.
    """
    directory = paths.checkpoint(id)
    for name in files.list_names(directory):
        is_mine = name.startswith(f"{owner.stem}.") and not name.endswith((".void", ".frozen.safetensors"))
        if is_mine:
            put_away(directory / name, spare)


def say(path: Location) -> str:
    """Why a checkpoint is void, from the word that was left."""
    try:
        void = Void.load(files.get(path, limit=_MAX_VOID_BYTES), path=str(path))
        return f"rank {void.rank}: {void.reason}"
    except DamagedError as error:
        return f"void, and the reason cannot be read: {error}"
