"""Where chains of lossy records lie in a run, and how one goes.

Owns:    `chains/<base>/` in the run's directory, one for each base that has records.
Not:     what is in them (codecs).
Holds:   a chain loses its document first, so that what remains after a crash is no chain.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from pathlib import Path
from typing import Final

from stepwell.errors import DamagedError
from stepwell.faults import crash_point
from stepwell.storage.store import files
from stepwell.storage.store.lineage import read_history
from stepwell.storage.store.objects import Location, ObjectPath
from stepwell.storage.store.paths import RunPaths
from stepwell.types import CheckpointId

_DOCUMENT: Final = "chain.json"


def chain_path(paths: RunPaths, base: CheckpointId) -> Path:
    """Where the records against a base lie. Runs in buckets have none: nothing can be appended there."""
    assert not isinstance(paths.root, ObjectPath)
    return paths.root / "chains" / base.directory


def list_chains(paths: RunPaths) -> list[tuple[CheckpointId, Path]]:
    """Bases and their chains, the newest first."""
    if isinstance(paths.root, ObjectPath):
        return []
    directory = paths.root / "chains"
    ids: list[CheckpointId] = []
    with contextlib.suppress(DamagedError):  # no directory: nobody needs what is behind it
        ids = [id for id in map(CheckpointId.parse, files.list_names(directory)) if id is not None]
    found = [(id, directory / id.directory) for id in sorted(ids, reverse=True)]
    return [(id, path) for id, path in found if files.is_directory(path) and files.exists(path / _DOCUMENT)]


def remove_chains(paths: RunPaths, keep: Collection[CheckpointId], newest: int) -> None:
    """Remove all but these and the newest ones whose bases are live checkpoints, and what is left of others."""
    history = read_history(paths)
    live = [id for id, _ in list_chains(paths) if history.is_live(id) and files.exists(paths.manifest(id))]
    for name in files.list_names(paths.root / "chains"):
        id = CheckpointId.parse(name)
        if id is not None and id not in live[:newest] and id not in keep:
            remove_chain(paths.root, id)


def remove_orphans(paths: RunPaths) -> None:
    """Remove chains whose base is gone: a process died between the two."""
    if isinstance(paths.root, ObjectPath) or not files.is_directory(paths.root / "chains"):
        return
    for name in files.list_names(paths.root / "chains"):
        id = CheckpointId.parse(name)
        if id is not None and not files.exists(paths.manifest(id)):
            remove_chain(paths.root, id)


def remove_chain(root: Location, base: CheckpointId) -> None:
    """Remove the records against a base, if there are some."""
    path = root / "chains" / base.directory
    if isinstance(path, ObjectPath) or not files.is_directory(path):
        return
    crash_point("chain.prune")
    with files.unless_gone(path):
        files.remove(path / _DOCUMENT)
        files.sync_directory(path)
        for name in files.list_names(path):
            files.remove(path / name)
        files.remove_directory(path)
