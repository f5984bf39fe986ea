"""Shards on their way into a bucket: the counterpart of `writer` where the run lies in object storage.

Owns:    cutting an image into parts, and a checksum for each block while it is at hand.
Holds:   no name before the snapshot is complete; the object appears with its last part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from stepwell.agent.files.writer import Arrive
from stepwell.faults import crash_point
from stepwell.storage.format.checksum import BLOCK_BYTES, block_digest
from stepwell.storage.store import objects
from stepwell.storage.store.objects import ObjectPath


@dataclass(frozen=True)
class UploadImage:
    """A file as it lies in memory, or will.

    memory, nbytes:  whole pages, of which so many bytes are the file
    arrive:          waits for leading bytes
    settle:          waits until it counts; before that no name is given. Both raise if it comes to nothing
    """

    memory: memoryview
    nbytes: int
    block_bytes: int
    arrive: Arrive
    settle: Callable[[], None]


def upload_image(path: ObjectPath, image: UploadImage) -> tuple[str, ...]:
    """Send an image as its bytes arrive. Returns the checksum of each block.

    Raises StorageError, or what the image's waits raise: then there is no object.
    """
    digests: list[str] = []
    memory, nbytes = image.memory, image.nbytes
    part = objects.part_bytes(nbytes)
    last = (nbytes - 1) // part * part

    def pieces() -> Iterator[memoryview]:
        for start in range(0, nbytes, part):
            end = min(start + part, nbytes)
            image.arrive(end)
            digests.extend(_digests(memory[start:end], image.block_bytes))
            if start <= nbytes // 2 < end:
                crash_point("shard.middle")
            if start == last:
                image.settle()  # bytes alone are no snapshot
            yield memory[start:end]

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
