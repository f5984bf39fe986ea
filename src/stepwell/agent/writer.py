"""Bytes from memory to a file: direct, in large blocks, by several threads, each block checksummed as it goes.

Owns:    how an image becomes a synced file under a temporary name.
Not:     names and order (store.commit).
Holds:   on return the file has exactly `nbytes` bytes, is synced, and every block's checksum is known.
"""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import Final

from stepwell.faults import crash_point
from stepwell.format.checksum import BLOCK_BYTES, block_count, block_digest
from stepwell.store import files

THREADS: Final = 2
_PAGE: Final = 4096


def write_image(path: Path, image: memoryview, nbytes: int) -> tuple[str, ...]:
    """Write the first `nbytes` of `image` (which holds whole pages). Returns the checksum of each block."""
    try:
        return _write(path, image, nbytes, direct=True)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    return _write(path, image, nbytes, direct=False)  # opened with O_DIRECT, but cannot write so


def _write(path: Path, image: memoryview, nbytes: int, *, direct: bool) -> tuple[str, ...]:
    fd = files.create(path, direct=direct)
    try:
        files.preallocate(fd, nbytes, path)
        digests = _write_blocks(fd, path, image, nbytes)
        files.truncate(fd, nbytes, path)  # the last block was whole pages, safetensors allows no trailing bytes
        crash_point("shard.written")
        files.sync(fd, path)
        crash_point("shard.synced")
    except OSError:
        path.unlink(missing_ok=True)  # never synced a second time: what is there may be holes
        raise
    finally:
        os.close(fd)
    return digests


def _write_blocks(fd: int, path: Path, image: memoryview, nbytes: int) -> tuple[str, ...]:
    count = block_count(nbytes, BLOCK_BYTES)
    digests = [""] * count
    errors: list[OSError] = []
    numbers, lock = iter(range(count)), threading.Lock()

    def work() -> None:
        while not errors:
            with lock:
                number = next(numbers, None)
            if number is None:
                return
            start = number * BLOCK_BYTES
            end = min(start + BLOCK_BYTES, nbytes)
            try:
                digests[number] = block_digest(image[start:end])
                files.write_at(fd, image[start : -(-end // _PAGE) * _PAGE], start, path)
            except OSError as error:
                errors.append(error)
            if number == count // 2:
                crash_point("shard.middle")

    helpers = [threading.Thread(target=work, daemon=True) for _ in range(min(THREADS, count) - 1)]
    for helper in helpers:
        helper.start()
    work()
    for helper in helpers:
        helper.join()
    if errors:
        raise errors[0]
    return tuple(digests)


def copy_file(source: Path, path: Path) -> tuple[int, tuple[str, ...]]:
    """Copy a user's file block by block. Returns its size and the checksum of each block."""
    digests, offset = [], 0
    fd = files.create(path)
    try:
        with source.open("rb") as file:
            while block := file.read(BLOCK_BYTES):
                digests.append(block_digest(block))
                files.write_at(fd, memoryview(block), offset, path)
                offset += len(block)
        files.sync(fd, path)
    except OSError:
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(fd)
    return offset, tuple(digests)


def digest_image(image: memoryview, nbytes: int) -> tuple[str, ...]:
    """Block checksums of an image that is not written yet."""
    return tuple(
        block_digest(image[start : min(start + BLOCK_BYTES, nbytes)]) for start in range(0, nbytes, BLOCK_BYTES)
    )
