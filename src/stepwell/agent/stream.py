"""A save that goes through a few megabytes of memory: for hosts without room for a whole snapshot.

The trainer fills a chunk, the agent writes it, the trainer fills the next. Training stands still meanwhile.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from stepwell.agent.cache import BoundedCache
from stepwell.agent.persist import Persister, block_bytes
from stepwell.agent.queue import Pending
from stepwell.errors import PersistError
from stepwell.format.checksum import BlockHasher
from stepwell.format.record import FileEntry
from stepwell.store import commit, files


class StreamedSave:
    """One streamed save in progress."""

    def __init__(self, persister: Persister, pending: Pending) -> None:
        self.pending = pending
        self._persister = persister
        self._name = f"{pending.owner.stem}.safetensors"
        self._started = time.monotonic()
        self._hasher = BlockHasher(block_bytes(pending.owner))
        self._offset = 0
        self._fd = -1
        self._temporary = Path()

    def open(self) -> None:
        """Make the directory and the temporary file."""
        directory = commit.open_checkpoint(self._persister.paths, self.pending.id, self.pending.owner)
        self._temporary = directory / f"{self._name}{files.TEMPORARY}"
        self._fd = files.create(self._temporary)
        self._cache = BoundedCache(self._fd, self._temporary)
        files.preallocate(self._fd, self.pending.layout.nbytes, self._temporary)

    def write(self, slot: int, nbytes: int) -> None:
        """Write the next chunk, which lies in `slot`."""
        image = self.pending.arena.image(slot, nbytes)
        self._hasher.update(image)
        files.write_at(self._fd, image, self._offset, self._temporary)
        self._offset += nbytes
        self._cache.wrote(nbytes)

    def finish(self) -> bool:
        """Sync, publish and commit. False: other ranks still write their parts."""
        if self._offset != self.pending.layout.nbytes:
            raise PersistError(f"streamed {self._offset} of {self.pending.layout.nbytes} bytes")
        files.sync(self._fd, self._temporary)
        self._cache.drop()
        self._close()
        commit.publish_file(self._temporary, self._temporary.with_name(self._name))
        grain = block_bytes(self.pending.owner)
        entry = FileEntry(self._name, "safetensors", self._offset, grain, self._hasher.finish())
        return self._persister.finish(self.pending, [entry], self._started)

    def abort(self) -> None:
        """Throw the temporary file away."""
        self._close()
        self._temporary.unlink(missing_ok=True)

    def _close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
