"""Where the files of a checkpoint go: a directory, or a bucket.

Owns:    how an image, a user's file or a stream of chunks becomes a durable file under its final name.
Not:     which files, and the order of record and manifest (persist, store.commit).
Holds:   a final name means whole and durable bytes of a complete snapshot. What fails leaves nothing that counts.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Protocol

from stepwell.agent.files.buffered import BoundedCache
from stepwell.agent.files.tuning import WritePlace, recall, remember
from stepwell.agent.files.upload import UploadImage, upload_file, upload_image
from stepwell.agent.files.writer import Writer, copy_file
from stepwell.events import run_events
from stepwell.storage.format.checksum import BlockHasher
from stepwell.storage.store import commit, files, objects
from stepwell.storage.store.mounts import file_system_type
from stepwell.storage.store.objects import Location, ObjectPath
from stepwell.storage.store.paths import RunPaths
from stepwell.storage.store.spare import Spare
from stepwell.types import Owner

Blocks = tuple[str, ...]
"""The checksum of each block of a file."""
Looks = tuple[float, float]
"""How soon it is looked again whether other ranks have written their parts, in seconds: at first, and at most."""


class SinkStream(Protocol):
    """A file that is written chunk by chunk. Nothing is visible before `finish`."""

    def write(self, data: memoryview) -> None:
        """The next bytes. Raises OSError."""
        ...

    def finish(self) -> Blocks:
        """Make it durable, under its name. Raises OSError."""
        ...

    def abort(self) -> None:
        """Throw it away."""
        ...


class Shelf(Protocol):
    """Takes files. Raises OSError."""

    looks: Looks

    @property
    def spare(self) -> Spare | None:
        """A file that may be overwritten, and takes the place of one that is removed."""
        ...

    def put_image(self, path: Location, image: UploadImage) -> Blocks:
        """Store an image as its bytes arrive."""
        ...

    def put_file(self, source: Path, path: Location) -> tuple[int, Blocks]:
        """Store a copy of a user's file. Returns its size too."""
        ...

    def open_stream(self, path: Location, nbytes: int, block_bytes: int) -> SinkStream:
        """Begin a file of `nbytes` bytes."""
        ...

    def news(self) -> run_events.Storage | None:
        """What was found out about the storage since the last time; kept for the next start."""
        ...

    def close(self) -> None:
        """No more files."""
        ...


def shelf_of(paths: RunPaths, writer: Writer, lineage: int) -> Shelf:
    """The shelf of a run."""
    return BucketShelf() if isinstance(paths.root, ObjectPath) else DiskShelf(paths, paths.root, writer, lineage)


class DiskShelf:
    """Files in a directory: a temporary name, synced, then the final one."""

    looks: Looks = (0.005, 0.5)

    def __init__(self, paths: RunPaths, root: Path, writer: Writer, lineage: int) -> None:
        self.spare: Spare | None = None
        self._paths, self._root, self._writer, self._lineage = paths, root, writer, lineage

    def put_image(self, path: Location, image: UploadImage) -> Blocks:
        temporary, final = _temporary(path)
        spare = self._open()
        is_there = spare.is_for(final) and spare.take(temporary)
        blocks = self._writer.write(
            temporary, image.memory, image.nbytes, image.arrive, reuse=is_there, block_bytes=image.block_bytes
        )
        try:
            image.settle()
        except BaseException:
            files.discard(temporary)
            raise
        commit.publish_file(temporary, final)
        return blocks

    def _open(self) -> Spare:
        """Once: what an earlier agent found out about this file system, and whether files may be used again."""
        if self.spare is None:
            kind = file_system_type(self._root)
            self.spare = Spare(self._root, Owner(self._paths.rank).stem, self._lineage, file_system=kind)
            with contextlib.suppress(OSError):
                known = recall(self._paths.storage, WritePlace.of(self._root))
                if known is not None:
                    self._writer.tuner.use(*known)
        return self.spare

    def put_file(self, source: Path, path: Location) -> tuple[int, Blocks]:
        temporary, final = _temporary(path)
        found = copy_file(source, temporary)
        commit.publish_file(temporary, final)
        return found

    def open_stream(self, path: Location, nbytes: int, block_bytes: int) -> SinkStream:
        return _FileStream(*_temporary(path), nbytes, block_bytes)

    def news(self) -> run_events.Storage | None:
        tuner = self._writer.tuner
        if not tuner.news:
            return None
        place, reason, tuner.news = WritePlace.of(self._root), tuner.news, ""
        with contextlib.suppress(OSError):  # found out again by the next agent
            remember(self._paths.storage, place, tuner.setting, tuner.rate)
        return run_events.Storage(
            file_system=place.file_system,
            threads=tuner.setting.threads,
            write_bytes=tuner.setting.write_bytes,
            bytes_per_second=tuner.rate,
            reason=reason,
        )

    def close(self) -> None:
        """What was kept for the next checkpoint goes."""
        if self.spare is not None:
            with contextlib.suppress(OSError):  # swept by the next start
                self.spare.drop()


def _temporary(path: Location) -> tuple[Path, Path]:
    assert isinstance(path, Path)
    return path.with_name(f"{path.name}{files.TEMPORARY}"), path


class _FileStream:
    def __init__(self, temporary: Path, final: Path, nbytes: int, block_bytes: int) -> None:
        self._temporary, self._final = temporary, final
        self._hasher = BlockHasher(block_bytes)
        self._offset = 0
        self._fd = files.create(temporary)
        self._cache = BoundedCache(self._fd, temporary)
        files.preallocate(self._fd, nbytes, temporary)

    def write(self, data: memoryview) -> None:
        self._hasher.update(data)
        files.write_at(self._fd, data, self._offset, self._temporary)
        self._offset += len(data)
        self._cache.wrote(len(data))

    def finish(self) -> Blocks:
        files.sync(self._fd, self._temporary)
        self._cache.drop()
        self._close()
        commit.publish_file(self._temporary, self._final)
        return self._hasher.finish()

    def abort(self) -> None:
        self._close()
        files.discard(self._temporary)

    def _close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class BucketShelf:
    """Objects in a bucket: they appear with their last part, under the final name."""

    looks: Looks = (0.05, 5.0)  # each look is a few requests, by every rank
    spare = None

    def put_image(self, path: Location, image: UploadImage) -> Blocks:
        assert isinstance(path, ObjectPath)
        return upload_image(path, image)

    def put_file(self, source: Path, path: Location) -> tuple[int, Blocks]:
        assert isinstance(path, ObjectPath)
        return upload_file(source, path)

    def open_stream(self, path: Location, nbytes: int, block_bytes: int) -> SinkStream:
        assert isinstance(path, ObjectPath)
        return _ObjectStream(path, nbytes, block_bytes)

    def news(self) -> run_events.Storage | None:
        return None

    def close(self) -> None:
        """Nothing is kept."""


class _ObjectStream:
    def __init__(self, path: ObjectPath, nbytes: int, block_bytes: int) -> None:
        self._hasher = BlockHasher(block_bytes)
        self._upload = objects.Upload(path, nbytes)

    def write(self, data: memoryview) -> None:
        self._hasher.update(data)
        self._upload.write(data)

    def finish(self) -> Blocks:
        self._upload.finish()
        return self._hasher.finish()

    def abort(self) -> None:
        """Without its end it never appears."""
