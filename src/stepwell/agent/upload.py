"""Shards on their way into a bucket: the counterpart of `writer` where the run lies in object storage.

Owns:    cutting an image into parts, and a checksum for each block while it is at hand.
Holds:   no name before the snapshot is complete; the object appears with its last part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from stepwell.agent.writer import Arrive
from stepwell.faults import crash_point
from stepwell.format.checksum import BLOCK_BYTES, block_digest
from stepwell.store import objects
from stepwell.store.objects import ObjectPath


def upload_image(
    path: ObjectPath,
    image: memoryview,
    nbytes: int,
    arrive: Arrive,
    wait_complete: Callable[[], None],
    *,
    block_bytes: int,
) -> tuple[str, ...]:
    """Send the front of an image as its bytes arrive. Returns the checksum of each block.

    Raises StorageError, or what `arrive` and `wait_complete` raise: then there is no object.
    """
    digests: list[str] = []
    part = objects.part_bytes(nbytes)
    last = (nbytes - 1) // part * part

    def pieces() -> Iterator[memoryview]:
        for start in range(0, nbytes, part):
            end = min(start + part, nbytes)
            arrive(end)
            digests.extend(_digests(image[start:end], block_bytes))
            if start <= nbytes // 2 < end:
                crash_point("shard.middle")
            if start == last:
                wait_complete()  # bytes alone are no snapshot
            yield image[start:end]

    objects.upload(path, pieces(), part)
    crash_point("shard.durable")
    return tuple(digests)


def upload_file(source: Path, path: ObjectPath) -> tuple[int, tuple[str, ...]]:
    """Send a user's file. Returns its size and the checksum of each block. Raises OSError."""
    digests: list[str] = []
    nbytes = 0
    part = objects.part_bytes(source.stat().st_size)

    def pieces() -> Iterator[memoryview]:
        nonlocal nbytes
        with source.open("rb") as file:
            while data := file.read(part):
                digests.extend(_digests(memoryview(data), BLOCK_BYTES))
                nbytes += len(data)
                yield memoryview(data)

    objects.upload(path, pieces(), part)
    return nbytes, tuple(digests)


def _digests(data: memoryview, block_bytes: int) -> list[str]:
    return [block_digest(data[low : low + block_bytes]) for low in range(0, len(data), block_bytes)]
