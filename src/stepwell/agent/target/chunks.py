"""A save that goes through a few megabytes of memory: for hosts without room for a whole snapshot.

The trainer fills a chunk, the agent writes it, the trainer fills the next. Training stands still meanwhile.
"""

from __future__ import annotations

import time

from stepwell.agent.files.sink import SinkStream
from stepwell.agent.pending import Pending
from stepwell.agent.target.shared_target import Persister, block_bytes
from stepwell.errors import PersistError
from stepwell.storage.format.record import FileEntry


class StreamedSave:
    """One streamed save in progress."""

    def __init__(self, persister: Persister, pending: Pending) -> None:
        self.pending = pending
        self._persister = persister
        self._name = f"{pending.owner.stem}.safetensors"
        self._started = time.monotonic()
        self._offset = 0
        self._stream: SinkStream | None = None
        self.is_committed = False

    def open(self) -> None:
        """Make the directory, and begin the file."""
        try:
            self._begin()
        except OSError as error:
            self._persister = self._persister.fall_back(error)
            self._begin()

    def _begin(self) -> None:
        directory = self._persister.open(self.pending)
        nbytes, grain = self.pending.layout.nbytes, block_bytes(self.pending.owner)
        self._stream = self._persister.shelf.open_stream(directory / self._name, nbytes, grain)

    def write(self, slot: int, nbytes: int) -> None:
        """Write the next chunk, which lies in `slot`."""
        assert self._stream is not None
        self._stream.write(self.pending.arena.image(slot, nbytes))
        self._offset += nbytes

    def finish(self) -> None:
        """Make it durable and, if this is all of it, commit."""
        assert self._stream is not None
        if self._offset != self.pending.layout.nbytes:
            raise PersistError(f"streamed {self._offset} of {self.pending.layout.nbytes} bytes")
        blocks = self._stream.finish()
        entry = FileEntry(self._name, "safetensors", self._offset, block_bytes(self.pending.owner), blocks)
        self.is_committed = self._persister.finish(self.pending, [entry], self._started)

    def abort(self) -> None:
        """Throw the file away."""
        if self._stream is not None:
            self._stream.abort()
