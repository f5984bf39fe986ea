"""Parity of one rank for its set, and shards that come back from it.

Owns:    the order: bytes under a temporary name, synced and named, then the document; a rebuilt shard likewise, its
         record last.
Not:     the code (codes), who is in the set (sets).
Holds:   inputs are verified block by block before anything is computed from them, and what is computed against the
         record of its owner. What is broken off leaves nothing that counts, and every source as it was.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from stepwell.errors import DamagedError
from stepwell.faults import crash_part, crash_point
from stepwell.levels.protect import erasure
from stepwell.levels.protect.copies import keep_shard, writing
from stepwell.levels.protect.shard_bytes import Logical
from stepwell.storage.format.checksum import PART_BYTES, BlockHasher, document_digest
from stepwell.storage.format.manifest import RecordRef
from stepwell.storage.format.parity_entry import Parity, parity_name
from stepwell.storage.format.record import FileEntry, Record
from stepwell.storage.store import commit, files, no_follow
from stepwell.storage.store.blocks import Fill
from stepwell.storage.store.paths import RunPaths
from stepwell.types import CheckpointId, Owner

Shard = tuple[bytes, Record, Fill]
"""A member's record, as bytes and parsed, and the way to its files."""
RECORD: Final = ".record"
"""Ending of the copy of a member's record whose files are not here."""


def record_copy(rank: int) -> str:
    """Where a node keeps the record of a member whose shard it does not hold."""
    return f"{Owner(rank).stem}{RECORD}"


def find_parity(paths: RunPaths, id: CheckpointId, rank: int) -> Parity | None:
    """The parity that a rank's agent left here, if its document can be read and its bytes are there."""
    directory = paths.checkpoint(id)
    path = directory / parity_name(rank)
    if not files.exists(path):
        return None
    found = Parity.load(files.get(path), path=str(path))
    facts = files.facts(directory / found.file.name)
    is_here = found.id == id and found.rank == rank and facts is not None and facts.nbytes == found.file.nbytes
    return found if is_here else None


def keep_parity(paths: RunPaths, id: CheckpointId, rank: int, losses: int, shards: Mapping[int, Shard]) -> int:
    """Make the parity of `rank` for the members of its set, itself among them. On return it is durable.

    Returns its bytes. Raises OSError or DamagedError.
    """
    members = tuple(sorted(shards))
    readers = [Logical(record.files, fill, f"rank {member}") for member, (_, record, fill) in sorted(shards.items())]
    layout = erasure.StripeLayout(tuple(reader.nbytes for reader in readers), losses)
    directory = paths.checkpoint(id)
    for member, (data, _, _) in shards.items():
        if member != rank:
            files.put_new(directory / record_copy(member), data, point="copy.record")
    name = parity_name(rank).replace(".json", ".bin")
    hasher = BlockHasher(PART_BYTES)
    final = directory / name
    assert isinstance(final, Path)
    with writing(final, layout.parity_bytes) as write:

        def keep(offset: int, data: memoryview) -> None:
            hasher.update(data)
            write(offset, data)
            crash_part("parity", offset, len(data), layout.parity_bytes)

        erasure.encode(layout, members.index(rank), lambda at, *range_of: readers[at].read(*range_of), keep)
        crash_point("parity.written")
    entry = FileEntry(name, "opaque", layout.parity_bytes, PART_BYTES, hasher.finish())
    records = [
        RecordRef(commit.record_name(record.owner), len(data), document_digest(data))
        for _, (data, record, _) in sorted(shards.items())
    ]
    run = shards[rank][1].run
    made = Parity(run, id, rank, members, losses, tuple(records), layout.lengths, entry)
    files.put(directory / parity_name(rank), made.dump(), point="parity")  # another set may have had one here
    return layout.parity_bytes


def rebuild(
    paths: RunPaths,
    wanted: tuple[bytes, Record],
    parity: Parity,
    lost: Sequence[int],
    shards: Mapping[int, Shard],
    rows: Mapping[int, tuple[Parity, Fill]],
) -> None:
    """Hold the shard of a lost member here. On return it is durable. Raises OSError or DamagedError.

    parity:  any document of the set
    lost:    positions of which the shard, or the parity, is not to be had
    shards:  of the other members, by position; `rows`: their parity
    """
    data, record = wanted
    layout = erasure.StripeLayout(parity.lengths, parity.losses)
    readers = {at: Logical(part.files, fill, f"rank {parity.members[at]}") for at, (_, part, fill) in shards.items()}
    parities = {at: Logical([row.file], fill, f"parity of rank {row.rank}") for at, (row, fill) in rows.items()}
    position = parity.members.index(record.owner.rank)
    directory = paths.checkpoint(record.id)
    assert isinstance(directory, Path)
    files.make_directory(directory)
    whole = directory / f"{record.owner.stem}.rebuilt.{os.getpid()}{files.TEMPORARY}"
    fd = no_follow.create_file(whole, os.O_RDWR)
    try:
        os.ftruncate(fd, record.nbytes)

        def write(at: int, offset: int, piece: memoryview) -> None:
            if at == position:
                files.write_at(fd, piece, offset, whole)
                crash_part("rebuild", offset, len(piece), record.nbytes)

        erasure.rebuild(
            layout,
            lost,
            lambda at, *range_of: readers[at].read(*range_of),
            lambda at, *range_of: parities[at].read(*range_of),
            write,
        )
        crash_point("rebuild.computed")
        keep_shard(paths, record, data, _from_one(fd, record))
    finally:
        os.close(fd)
        files.discard(whole)


def _from_one(fd: int, record: Record) -> Fill:
    """The files of a record, which lie one after the other in one."""
    starts, position = {}, 0
    for file in record.files:
        starts[file.name], position = position, position + file.nbytes

    def fill(file: FileEntry, start: int, buffer: memoryview) -> None:
        if os.preadv(fd, [buffer], starts[file.name] + start) != len(buffer):
            raise DamagedError(f"{file.name}: rebuilt bytes end early", path=file.name)

    return fill
