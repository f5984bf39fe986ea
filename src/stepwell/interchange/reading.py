"""Leaves of a checkpoint on disk, every byte checked on the way.

Owns:    which files and blocks are touched for the leaves that are wanted.
Not:     where the bytes go (`deliver`).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from stepwell.errors import DamagedError
from stepwell.format.record import LeafEntry, Record
from stepwell.restore.read import Deliver, FileSource, read_file

OnBytes = Callable[[int], None]
"""Told of every piece delivered, for a progress bar. From several threads at once."""


def entries_of(record: Record, wanted: set[str]) -> list[LeafEntry]:
    """The record's entries for these leaves. A leaf that the tree names and the record lacks is damage."""
    found = [entry for entry in record.leaves if entry.name in wanted]
    if len(found) != len(wanted):
        missing = min(wanted - {entry.name for entry in found})
        raise DamagedError(f"{record.id}: the record lacks leaf {missing!r}", leaf=missing)
    return found


def deliver_leaves(
    record: Record, directory: Path, wanted: set[str], deliver: Deliver, on_bytes: OnBytes | None = None
) -> None:
    """Read the files of a checkpoint and hand on the wanted leaves. Raises DamagedError at the first bad block."""
    entries = entries_of(record, wanted)

    def counted(leaf: LeafEntry, offset: int, data: memoryview) -> None:
        deliver(leaf, offset, data)
        if on_bytes is not None:
            on_bytes(len(data))

    for number, file in enumerate(record.files):
        leaves = [entry for entry in entries if entry.file == number]
        if leaves:
            source = FileSource(directory / file.name)
            try:
                read_file(source, file, leaves, counted, check_all=False)
            finally:
                source.close()
