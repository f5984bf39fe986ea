"""Parts of ranks whose node could not hold them: they lie in the run's own directory, beside no manifest.

Owns:    reading them as those of a peer are read, and the name under which an inventory has them.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from stepwell.errors import DamagedError, PeerError
from stepwell.storage.store import files, objects
from stepwell.storage.store.objects import ObjectPath
from stepwell.storage.store.paths import RunPaths

SHARED: Final = "the shared place"
"""Among the nodes of an inventory; no id of a node looks so."""


class SharedReader:
    """See `copies.Reader`. What is not there is an error of this peer; a bucket that does not answer raises as ever."""

    def __init__(self, paths: RunPaths) -> None:
        self._root = paths.root

    def read(self, directory: str, name: str, start: int, nbytes: int, buffer: memoryview) -> None:
        place = self._root / directory / name
        try:
            got = _read(place, start, buffer[:nbytes])
        except FileNotFoundError as error:
            raise PeerError(f"{place}: there is no such file", peer=SHARED, path=str(place)) from error
        if got != nbytes:
            raise PeerError(f"{place}: ends at {start + got}", peer=SHARED, path=str(place), found=start + got)


def _read(place: Path | ObjectPath, start: int, buffer: memoryview) -> int:
    if isinstance(place, ObjectPath):
        return objects.get_range(place, start, len(buffer), buffer) if buffer else 0
    fd, done = files.open_regular(place), 0
    try:
        while done < len(buffer) and (got := os.preadv(fd, [buffer[done:]], start + done)):
            done += got
    except OSError as error:
        raise DamagedError(f"{place}: cannot be read: {error.strerror}", path=str(place)) from error
    finally:
        os.close(fd)
    return done
