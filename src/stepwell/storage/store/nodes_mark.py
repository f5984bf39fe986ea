"""How far the nodes are ahead of the shared place, for a start that finds nothing in their caches.

Owns:    `nodes.json`: the newest checkpoint that was whole on the nodes when it was written.
Holds:   it is written a little later than such a checkpoint, and not for each of them: newer ones may be there, older
         ones may be gone. One of a history that the run has left means nothing. Whoever removes the file gives up what
         lies on the nodes alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from stepwell.errors import DamagedError
from stepwell.storage.format.document import Fields, seal, unseal
from stepwell.storage.store import files
from stepwell.storage.store.objects import ObjectPath
from stepwell.storage.store.paths import RunPaths
from stepwell.types import CheckpointId

KIND: Final = "stepwell.nodes/1"
_MAX_BYTES: Final = 64 << 10


@dataclass(frozen=True)
class Mark:
    """The newest that was whole on the nodes of a run. `cache`: their directory; empty if they had different ones."""

    run: str
    newest: CheckpointId
    cache: str

    def dump(self) -> bytes:
        """Bytes of `nodes.json`."""
        return seal({"format": KIND, "run": self.run, "newest": self.newest.directory, "cache": self.cache})

    @classmethod
    def load(cls, data: bytes, *, path: str) -> Mark:
        """Parse and check it. Raises DamagedError."""
        fields = Fields(unseal(data, path=path, kind=KIND), path=path)
        newest = CheckpointId.parse(fields.text("newest"))
        if newest is None:
            raise DamagedError(f"{path}: newest is no checkpoint", path=path)
        return cls(fields.run_id("run"), newest, fields.text("cache"))


def read_mark(paths: RunPaths) -> Mark | None:
    """What the nodes were known to hold; None if nothing ever was. Raises DamagedError."""
    if not files.exists(paths.nodes):
        return None
    return Mark.load(files.get(paths.nodes, limit=_MAX_BYTES), path=str(paths.nodes))


def leave_mark(paths: RunPaths, mark: Mark) -> None:
    """Durable on return. Raises OSError."""
    files.put(paths.nodes, mark.dump(), point="nodes")


def remove_unfinished(paths: RunPaths) -> None:
    """Remove what a writer that was killed has left beside the file: there is one writer at a time. Raises OSError."""
    if isinstance(paths.root, ObjectPath):
        return  # in a bucket nothing has a temporary name
    for name in files.list_names(paths.root, follow=True):
        if name.startswith(f"{paths.nodes.name}.") and name.endswith(files.TEMPORARY):
            files.remove(paths.root / name)
