"""What rank 0 decided about whole checkpoints, as this node keeps it: beside the parts, or in memory.

Owns:    manifest and `level.json` of each, and how many checkpoints were not carried on since one was.
Holds:   a disk that cannot be written, or is full, keeps no checkpoint from being whole: the next agent of this rank
         asks for the decision again, or makes it again from the same parts.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from stepwell.errors import DamagedError
from stepwell.faults import crash_point
from stepwell.levels import cached
from stepwell.levels.cached import Level
from stepwell.storage.format.manifest import Manifest
from stepwell.storage.store import catalog, files
from stepwell.storage.store.paths import RunPaths
from stepwell.types import CheckpointId

_MOST: Final = 16
"""Decisions in memory: of the newest checkpoints."""


class Decisions:
    """Of one node, as one rank keeps them."""

    def __init__(self, paths: RunPaths) -> None:
        self._paths = paths
        self._held: dict[CheckpointId, tuple[bytes, bytes]] = {}

    def keep(self, id: CheckpointId, manifest: bytes, level: bytes) -> None:
        """Let it be whole: first what is to become of it, then the manifest."""
        try:
            files.put_new(self._paths.checkpoint(id) / "level.json", level, point="level")
            files.put_new(self._paths.manifest(id), manifest, point="manifest")
        except OSError:
            self._held[id] = manifest, level
            for old in sorted(self._held)[:-_MOST]:
                del self._held[old]
        crash_point("manifest.durable")

    def has(self, id: CheckpointId) -> bool:
        """Whether it is decided, as far as this node knows."""
        return id in self._held or files.exists(self._paths.manifest(id))

    def level(self, id: CheckpointId) -> Level | None:
        """What is to become of it."""
        if id in self._held:
            return Level.load(self._held[id][1], path="memory")
        return cached.read_level(self._paths, id)

    def manifest(self, id: CheckpointId) -> bytes:
        """Its bytes. Raises DamagedError if there is none."""
        return self._held[id][0] if id in self._held else files.get(self._paths.manifest(id))

    def read_manifest(self, id: CheckpointId) -> Manifest:
        """The manifest, checked. Raises DamagedError."""
        if id in self._held:
            return Manifest.load(self._held[id][0], path="memory")
        return catalog.read_manifest(self._paths, id)

    def dump(self, id: CheckpointId) -> tuple[str, str] | None:
        """Manifest and level as they travel; None if nothing is decided."""
        level = self.level(id) if self.has(id) else None
        try:
            return None if level is None else (self.manifest(id).decode(), level.dump().decode())
        except DamagedError:
            return None

    def since_flush(self, id: CheckpointId, dead: Collection[str]) -> int:
        """How many were whole since one was carried on: as the newest before this one says, whoever decided that."""
        for other in sorted({*cached.readable_steps(self._paths), *self._held}, reverse=True):
            if other < id and other.directory not in dead:
                level = self.level(other)
                if level is not None:
                    return level.since
        return 0
