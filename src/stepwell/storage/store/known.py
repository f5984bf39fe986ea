"""What a process has read of its run once, because it never changes.

Owns:    the lineages and manifests that were read, so that a commit costs the same after a thousand others.
Holds:   bounded. Whether something is still there, or something new, is never answered from here: anybody may add a
         lineage at any time, and a manifest may go.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from stepwell.storage.format.manifest import Lineage, Manifest
from stepwell.types import CheckpointId

_MOST_LINEAGES: Final = 32_768
_MOST_RECORDS: Final = 65_536
"""Of all manifests together: each names one of every rank. What is beyond is read again each time."""


class Known:
    """Of one run, for an agent of one lineage. Any thread."""

    def __init__(self) -> None:
        self.newest = 0
        """The highest number of a lineage that was seen."""
        self.lineages: dict[int, Lineage] = {}
        self._manifests: dict[CheckpointId, Manifest] = {}
        self.swept: set[CheckpointId] = set()
        """Committed checkpoints in which no temporary file is left."""
        self.is_swept = False
        """Beside the lineages none is left either."""

    def note_lineage(self, lineage: Lineage) -> None:
        """It was read, and is sound."""
        if len(self.lineages) < _MOST_LINEAGES:
            self.lineages[lineage.number] = lineage

    def manifest(self, id: CheckpointId) -> Manifest | None:
        """As it was read before. None: read it."""
        return self._manifests.get(id)

    def note_manifest(self, manifest: Manifest) -> None:
        """It was read, and is sound."""
        count = len(self._manifests) + 1
        if count * manifest.world_size <= _MOST_RECORDS:
            self._manifests[manifest.id] = manifest

    def keep_only(self, there: Collection[CheckpointId]) -> None:
        """All other checkpoints are gone."""
        for id in self._manifests.keys() - there:
            del self._manifests[id]
        self.swept.intersection_update(there)
