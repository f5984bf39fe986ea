"""The way to the bytes of a file of a checkpoint, on disk or in a bucket.

Holds:   an object that ends early or is gone is damage; a bucket that does not answer is not (StorageError).
"""

from __future__ import annotations

from typing import Final

from stepwell.errors import DamagedError
from stepwell.restore.byte_sources import BlockSource, FileSource
from stepwell.storage.store import objects
from stepwell.storage.store.objects import Location, ObjectPath

_THREADS: Final = 16
"""Each waits for an answer most of the time."""


class ObjectSource:
    """An object in a bucket, read range by range."""

    threads = _THREADS

    def __init__(self, path: ObjectPath) -> None:
        self._path = path

    @property
    def label(self) -> str:
        return str(self._path)

    def read(self, start: int, nbytes: int, buffer: memoryview) -> memoryview:
        try:
            got = objects.get_range(self._path, start, nbytes, buffer)
        except FileNotFoundError as error:
            raise DamagedError(str(error), path=self.label) from error
        if got != nbytes:
            raise DamagedError(f"{self._path}: ends at {start + got}", path=self.label, found=start + got)
        return buffer[:nbytes]

    def close(self) -> None:
        """Nothing was opened."""


def open_file(path: Location) -> BlockSource:
    """A file of a checkpoint, to be read. Raises DamagedError if it cannot be opened."""
    return ObjectSource(path) if isinstance(path, ObjectPath) else FileSource(path)
