"""A quick look at every checkpoint of a run: what it is, how large, and whether it is whole as far as sizes tell.

Owns:    the look, and the words for a checkpoint's flags.
Before:  `store.catalog` judged by manifest alone.   After: `verify` reads the bytes themselves.
Holds:   an entry counts as good only if every record it names is there, unchanged, and its files have their sizes.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from typing import Final

from stepwell.errors import DamagedError
from stepwell.storage.format.manifest import Manifest
from stepwell.storage.store import catalog, files
from stepwell.storage.store.paths import RunPaths

_MOST_SURVEYS: Final = 5


@dataclass(frozen=True)
class Surveyed:
    """One checkpoint directory. `entry` as judged here; `manifest` as it reads, even if something else is damaged."""

    entry: catalog.Entry
    manifest: Manifest | None
    nbytes: int
    created: float

    @property
    def branch(self) -> str:
        """Whether a restart would look at it."""
        return "live" if self.entry.is_live else "abandoned"

    @property
    def flags(self) -> list[str]:
        """What is special about it."""
        manifest, entry = self.manifest, self.entry
        found = []
        if not entry.is_committed:
            found.append("uncommitted" if entry.void is None else "void")
        if entry.damage is not None:
            found.append("damaged")
        if manifest is not None:
            found += [f"{manifest.world_size} ranks"] if manifest.world_size > 1 else []
            found += [f"name {manifest.name}"] if manifest.name is not None else []
            found += ["suspect"] if manifest.suspect is not None else []
            found += ["finished"] if manifest.finished else ["epoch end"] if manifest.epoch_end else []
            found += [] if manifest.exact else ["lossy"]
        return found


def survey(paths: RunPaths) -> list[Surveyed]:
    """All checkpoint directories, newest step first. One that is pruned while we look is left out."""
    found: list[Surveyed] = []
    for _ in range(_MOST_SURVEYS):
        entries = catalog.scan_again(paths)
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                found.append(look(paths, entry))
        if found or not entries:  # else a live run removed all of them meanwhile, and there are others
            break
    return found


def look(paths: RunPaths, entry: catalog.Entry) -> Surveyed:
    """Check the records of one checkpoint. Raises FileNotFoundError if it went away meanwhile."""
    manifest = entry.manifest
    if manifest is not None:
        try:
            for rank in range(manifest.world_size):
                catalog.read_record(paths, manifest, rank)
        except DamagedError as error:
            if not files.exists(paths.manifest(entry.id)):
                raise FileNotFoundError(str(entry.path)) from error  # pruned by a live run, not damaged
            entry = replace(entry, manifest=None, damage=str(error))
    if manifest is not None:
        return Surveyed(entry, manifest, manifest.nbytes, manifest.created)
    found = catalog.directory_facts(entry.path)
    return Surveyed(entry, None, found.nbytes, found.modified)
