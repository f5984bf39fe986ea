"""Letting go of what was found damaged on this node, so that it is held again from where it is right.

Before:  a restart read around it.   After: the agent finds it missing, and copies or makes it anew.
Holds:   looked at once more before anything goes, and only the document goes: what it names is written over.
"""

from __future__ import annotations

from collections.abc import Iterable

from stepwell.errors import DamagedError
from stepwell.levels.inventory import Place
from stepwell.levels.protect.copies import is_good
from stepwell.levels.protect.parity import find_parity
from stepwell.storage.format.parity_entry import parity_name
from stepwell.storage.store import assemble, files
from stepwell.storage.store.commit import record_name
from stepwell.storage.store.paths import RunPaths
from stepwell.types import CheckpointId, Owner


def mend(paths: RunPaths, id: CheckpointId, doubted: Iterable[Place], node: str) -> None:
    """Of the doubted places, those on this node. Raises OSError."""
    directory = paths.checkpoint(id)
    for kind, rank, where in doubted:
        if where == node:
            name = record_name(Owner(rank)) if kind == "shard" else parity_name(rank)
            if not _is_good(paths, id, kind, rank):
                files.remove(directory / name)


def _is_good(paths: RunPaths, id: CheckpointId, kind: str, rank: int) -> bool:
    try:
        record = assemble.find_record(paths, id, Owner(rank)) if kind == "shard" else None
        parity = find_parity(paths, id, rank) if kind == "parity" else None
    except DamagedError:
        return False
    entries = [] if record is None else list(record.files)
    entries += [] if parity is None else [parity.file]
    return all(is_good(paths.checkpoint(id) / file.name, file) for file in entries)
