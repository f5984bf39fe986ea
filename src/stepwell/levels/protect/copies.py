"""Copying a shard from another node into this one's cache.

Owns:    the order: files under temporary names, verified block by block, synced and named; the record last.
Before:  the other node has the shard, and said which record belongs to it.   After: this node holds it too.
Holds:   a name means whole and verified bytes; what is broken off leaves nothing that counts; nothing is ever moved.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

from stepwell.errors import DamagedError
from stepwell.faults import crash_part, crash_point
from stepwell.levels import cached
from stepwell.storage.format.checksum import document_digest
from stepwell.storage.format.record import FileEntry, Record
from stepwell.storage.store import assemble, commit, files
from stepwell.storage.store.blocks import Fill, check_blocks, fill_from, verified_blocks
from stepwell.storage.store.objects import Location
from stepwell.storage.store.paths import RunPaths
from stepwell.types import CheckpointId, Owner


class Reader(Protocol):
    """What a peer can be asked for."""

    def read(self, directory: str, name: str, start: int, nbytes: int, buffer: memoryview) -> None:
        """Fill the buffer. Raises OSError."""
        ...


def fetch_record(peer: Reader, id: CheckpointId, run: str, item: cached.Held) -> tuple[bytes, Record]:
    """A rank's record from another node, as that node described it. Raises OSError or DamagedError."""
    owner = Owner(item.rank, item.world_size)
    name, data = commit.record_name(owner), bytearray(item.nbytes)
    peer.read(id.directory, name, 0, item.nbytes, memoryview(data))
    found = document_digest(bytes(data))
    path = f"{id.directory}/{name}"
    if found != item.digest:
        raise DamagedError(f"{path}: digest {found}, {item.digest} was told", path=path, found=found)
    record = Record.load(bytes(data), path=path)
    if record.id != id or record.run != run or record.owner != owner:
        raise DamagedError(f"{path}: belongs to {record.id} of run {record.run}", path=path)
    return bytes(data), record


def copy_shard(peer: Reader, paths: RunPaths, id: CheckpointId, run: str, item: cached.Held) -> Record:
    """Hold a copy of another rank's shard. On return it is durable. Raises OSError or DamagedError."""
    data, record = fetch_record(peer, id, run, item)

    def fill(file: FileEntry, start: int, buffer: memoryview) -> None:
        peer.read(id.directory, file.name, start, len(buffer), buffer)

    keep_shard(paths, record, data, fill)
    return record


def keep_shard(paths: RunPaths, record: Record, data: bytes, fill: Fill, *, may_link: bool = True) -> None:
    """Write a shard whose bytes come from elsewhere; `data` are those of its record. Raises OSError or DamagedError.

    may_link:  a file that an older shard has too is linked; not where others may change that one in place
    """
    directory = paths.checkpoint(record.id)
    files.make_directory(directory)
    older = _older(paths, record) if may_link else {}
    for file in record.files:
        final = directory / file.name
        assert isinstance(final, Path)
        if is_good(final, file):
            continue  # an agent before this one died between two files
        source = older.get(file)
        if source is None or not commit.share_file(source, final):
            _write(final, file, fill)
    crash_point("copy.files")
    place = directory / commit.record_name(record.owner)
    if not files.put_new(place, data, point="copy.record") and files.get(place) != data:
        files.put(place, data, point="copy.record")  # what was there cannot be read, or these would not be its files


def is_good(place: Location, file: FileEntry) -> bool:
    """Whether this very content is there: a file that was found damaged has the right name and length too."""
    assert isinstance(place, Path)
    facts = files.facts(place)
    if facts is None or facts.nbytes != file.nbytes:
        return False
    with contextlib.suppress(OSError, DamagedError), open(files.open_regular(place), "rb", buffering=0) as source:
        check_blocks(file, fill_from(source, str(place)), str(place))
        return True
    return False


def _older(paths: RunPaths, record: Record) -> dict[FileEntry, Path]:
    """Files of an older copy of this rank's shard, by content: what does not change is linked."""
    for id in cached.steps(paths):
        if id < record.id:
            older = assemble.find_record(paths, id, record.owner)
            if older is not None:
                places = {file: paths.checkpoint(id) / file.name for file in older.files}
                return {file: place for file, place in places.items() if isinstance(place, Path)}
    return {}


@contextlib.contextmanager
def writing(final: Path, nbytes: int) -> Iterator[Callable[[int, memoryview], None]]:
    """A new file of so many bytes, by what is called with offset and data. After the block it is durable under its
    name; if the block is broken off nothing is left. Raises OSError.
    """
    temporary = final.with_name(f"{final.name}.{os.getpid()}{files.TEMPORARY}")
    fd = files.create(temporary)
    try:
        files.preallocate(fd, nbytes, temporary)
        yield lambda offset, data: files.write_at(fd, data, offset, temporary)
        files.sync(fd, temporary)
    except BaseException:
        files.discard(temporary)
        raise
    finally:
        os.close(fd)
    commit.publish_file(temporary, final, is_same=True)


def _write(final: Path, file: FileEntry, fill: Fill) -> None:
    with writing(final, file.nbytes) as write:
        for start, block in verified_blocks(file, fill, file.name):
            write(start, block)
            crash_part("copy", start, len(block), file.nbytes)
