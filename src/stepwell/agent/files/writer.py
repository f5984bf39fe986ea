"""Bytes from memory to a file: direct, in large writes, by several threads, each block checksummed as it goes.

Owns:    how an image becomes a synced file under a temporary name, also while the image is still being filled.
Not:     names and order (store.commit); how many threads, and how large the writes (tuning).
Holds:   on return the file has exactly `nbytes` bytes, is synced, and every block's checksum is known. Bytes are read
         once they are final, never before. What is written does not stay in the page cache.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from stepwell.agent.files.buffered import BoundedCache
from stepwell.agent.files.tuning import Setting, Tuner
from stepwell.agent.files.writer_threads import Pool
from stepwell.faults import crash_point
from stepwell.storage.format.checksum import BLOCK_BYTES, BlockHasher, block_count, block_digest
from stepwell.storage.store import files

Arrive = Callable[[int], float]
"""Waits until so many leading bytes of an image are final; returns how long that took, in seconds."""
_PAGE: Final = 4096
_FEW_BYTES: Final = 4 << 20
_MOST_WAITING: Final = 0.1  # of the time of a segment: beyond, it says nothing about the disk


def _all_there(_: int) -> float:
    return 0.0


class Writer:
    """Writes images, one after the other. Its threads and what it learned about the disk stay."""

    def __init__(self) -> None:
        self.tuner = Tuner()
        self._pool = Pool()
        self._has_reused = False

    def write(
        self,
        path: Path,
        image: memoryview,
        nbytes: int,
        arrive: Arrive = _all_there,
        *,
        reuse: bool = False,
        block_bytes: int = BLOCK_BYTES,
    ) -> tuple[str, ...]:
        """Write the first `nbytes` of `image` (which holds whole pages). Returns the checksum of each block.

        Raises what `arrive` raises; then, as after an OSError, there is no file. `reuse`: over a file that is there.
        """
        if reuse and not self._has_reused:
            self._has_reused = True
            self.tuner.search_again("stepwell overwrites files from now on")
        try:
            return self._write(path, image, nbytes, arrive, block_bytes, direct=True, reuse=reuse)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
        return self._write(
            path, image, nbytes, arrive, block_bytes, direct=False
        )  # opened with O_DIRECT, but cannot write so

    def _write(
        self,
        path: Path,
        image: memoryview,
        nbytes: int,
        arrive: Arrive,
        block_bytes: int,
        *,
        direct: bool,
        reuse: bool = False,
    ) -> tuple[str, ...]:
        fd = files.create(path, direct=direct, reuse=reuse)
        try:
            files.preallocate(fd, nbytes, path)
            output = _Output(fd, path, image, nbytes, arrive, block_bytes)
            while output.position < nbytes:
                self._write_segment(output)
            files.truncate(fd, nbytes, path)  # the last block was whole pages, safetensors allows no trailing bytes
            crash_point("shard.written")
            files.sync(fd, path)
            crash_point("shard.synced")
            output.cache.drop()
        except Exception:
            files.discard(path)  # never synced a second time: what is there may be holes
            raise
        finally:
            os.close(fd)
        return tuple(output.digests)

    def _write_segment(self, output: _Output) -> None:
        setting, nbytes = self.tuner.plan(output.nbytes - output.position)
        started = time.monotonic()
        waited = output.open(setting, nbytes)
        if nbytes <= _FEW_BYTES:
            output.work()  # not worth waking others
        else:
            self._pool.run(output.work, min(setting.threads, -(-nbytes // setting.unit_bytes)))
        seconds = time.monotonic() - started - waited  # the first bytes: nothing could be written meanwhile
        if output.waited <= _MOST_WAITING * seconds:
            self.tuner.note(setting, nbytes, seconds)


class _Output:
    """One file being written. Its threads take unit after unit, in the order in which the bytes become final."""

    def __init__(self, fd: int, path: Path, image: memoryview, nbytes: int, arrive: Arrive, block_bytes: int) -> None:
        self.nbytes = nbytes
        self.digests = [""] * block_count(nbytes, block_bytes)
        self._block_bytes = block_bytes
        self.cache = BoundedCache(fd, path)
        self.position = 0
        self.waited = 0.0
        self._fd = fd
        self._path = path
        self._image = image
        self._arrive = arrive
        self._lock = threading.Lock()
        self._end = 0
        self._setting = Setting(1, BLOCK_BYTES)
        self._has_failed = False

    def open(self, setting: Setting, nbytes: int) -> float:
        """The next `nbytes` may be written. Waits for the first of them; returns how long."""
        self._setting, self._end = setting, self.position + nbytes
        self.waited = 0.0
        return self._arrive(min(self.position + setting.unit_bytes, self._end))

    def work(self) -> None:
        """One thread: write unit after unit until the segment is done, or somebody failed."""
        try:
            while (start := self._take()) is not None:
                self._write_unit(start, min(start + self._setting.unit_bytes, self._end))
        except BaseException:
            self._has_failed = True
            raise

    def _take(self) -> int | None:
        with self._lock:  # who waits for bytes holds it: the others would need even later ones
            start = self.position
            if self._has_failed or start >= self._end:
                return None
            end = min(start + self._setting.unit_bytes, self._end)
            self.waited += self._arrive(end)
            self.position = end
            return start

    def _write_unit(self, start: int, end: int) -> None:
        size, block = self._setting.write_bytes, self._block_bytes
        first, last = start // block, block_count(end, block)
        if size < BLOCK_BYTES:
            hasher = BlockHasher(block)
            for low in range(start, end, size):  # piece by piece: what was hashed is in the cache when it is written
                high = min(low + size, end)
                hasher.update(self._image[low:high])
                self._put(low, high)
            self.digests[first:last] = hasher.finish()
        else:
            for low in range(start, end, block):
                self.digests[low // block] = block_digest(self._image[low : min(low + block, end)])
            self._put(start, end)
        if first <= len(self.digests) // 2 < last:
            crash_point("shard.middle")

    def _put(self, start: int, end: int) -> None:
        files.write_at(self._fd, self._image[start : -(-end // _PAGE) * _PAGE], start, self._path)
        self.cache.wrote(end - start)


def copy_file(source: Path, path: Path) -> tuple[int, tuple[str, ...]]:
    """Copy a user's file block by block. Returns its size and the checksum of each block."""
    digests, offset = [], 0
    fd = files.create(path)
    cache = BoundedCache(fd, path)
    try:
        with source.open("rb") as file:
            while block := file.read(BLOCK_BYTES):
                digests.append(block_digest(block))
                files.write_at(fd, memoryview(block), offset, path)
                offset += len(block)
                cache.wrote(len(block))
        files.sync(fd, path)
        cache.drop()
    except OSError:
        files.discard(path)
        raise
    finally:
        os.close(fd)
    return offset, tuple(digests)


def digest_image(image: memoryview, nbytes: int, block_bytes: int = BLOCK_BYTES) -> tuple[str, ...]:
    """Block checksums of an image that is not written yet, by as many threads as there are cores."""
    starts = iter(range(0, nbytes, block_bytes))
    digests = [""] * block_count(nbytes, block_bytes)
    lock = threading.Lock()

    def work() -> None:
        while True:
            with lock:
                start = next(starts, None)
            if start is None:
                return
            digests[start // block_bytes] = block_digest(image[start : min(start + block_bytes, nbytes)])

    helpers = [threading.Thread(target=work, daemon=True) for _ in range(min(_cores(), len(digests)) - 1)]
    for helper in helpers:
        helper.start()
    work()
    for helper in helpers:
        helper.join()
    return tuple(digests)


def _cores() -> int:
    return len(os.sched_getaffinity(0))
