"""Verified reading: blocks and leaves of any size meet in any way, and every byte arrives where it belongs."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stepwell.errors import DamagedError
from stepwell.restore.byte_sources import BlockSource, FileSource, MemorySource
from stepwell.restore.verified_read import read_file
from stepwell.storage.format.checksum import block_digest
from stepwell.storage.format.record import FileEntry, LeafEntry

BLOCK = 4096


def stored(data: bytes) -> FileEntry:
    blocks = tuple(block_digest(data[start : start + BLOCK]) for start in range(0, len(data), BLOCK))
    return FileEntry("x", "opaque", len(data), BLOCK, blocks)


def leaves(cuts: list[int], end: int) -> list[LeafEntry]:
    edges = [0, *sorted(cuts), end]
    return [
        LeafEntry(f"l{i}", 0, "uint8", (b - a,), a, b, "value", "cpu", (b - a,), (0,))
        for i, (a, b) in enumerate(pairwise(edges))
    ]


@contextlib.contextmanager
def in_memory(content: bytes, *, before: int = 0) -> Iterator[MemorySource]:
    """An arena with something before and after the image."""
    fd = os.memfd_create("test")
    try:
        os.write(fd, bytes(before) + content + b"after")
        yield MemorySource(fd, before, len(content), "x")
    finally:
        os.close(fd)


def read(source: BlockSource, file: FileEntry, wanted: list[LeafEntry], *, check_all: bool) -> dict[str, bytearray]:
    found = {leaf.name: bytearray(leaf.end - leaf.start) for leaf in wanted}

    def deliver(leaf: LeafEntry, offset: int, data: memoryview) -> None:
        found[leaf.name][offset : offset + len(data)] = data

    try:
        read_file(source, file, wanted, deliver, check_all=check_all)
    finally:
        source.close()
    return found


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(st.integers(1, 5 * BLOCK), st.data())
def test_every_byte_arrives_where_it_belongs(tmp_path: Path, nbytes: int, data: st.DataObject) -> None:
    content = bytes((i * 7 + i // 251) % 256 for i in range(nbytes))
    path = tmp_path / "x"
    path.write_bytes(content)
    file = stored(content)
    every = leaves(data.draw(st.lists(st.integers(0, nbytes), max_size=8)), nbytes)
    wanted = [leaf for leaf in every if data.draw(st.booleans())]
    with in_memory(content, before=data.draw(st.integers(0, 9000))) as memory:
        for source in (FileSource(path), memory):
            found = read(source, file, wanted, check_all=data.draw(st.booleans()))
            for leaf in wanted:
                assert found[leaf.name] == content[leaf.start : leaf.end]


def test_only_the_blocks_that_are_needed_are_read_and_checked(tmp_path: Path) -> None:
    content = bytes(4 * BLOCK)
    path = tmp_path / "x"
    path.write_bytes(content[:-1] + b"!")  # damage in the last block
    (first, _) = leaves([BLOCK], 4 * BLOCK)
    assert read(FileSource(path), stored(content), [first], check_all=False)["l0"] == bytes(BLOCK)
    with pytest.raises(DamagedError, match="bytes 12288 to 16384 have checksum"):
        read(FileSource(path), stored(content), [first], check_all=True)


def test_nothing_of_a_damaged_block_is_delivered(tmp_path: Path) -> None:
    content = bytes(range(256)) * 32
    path = tmp_path / "x"
    path.write_bytes(content[:100] + b"!" + content[101:])
    found = []
    source = FileSource(path)
    with pytest.raises(DamagedError):
        read_file(source, stored(content), leaves([], len(content)), lambda *all: found.append(all[1]), check_all=True)
    source.close()
    assert 0 not in found


def test_a_file_that_ends_early_is_damage(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(bytes(5000))
    with pytest.raises(DamagedError, match="x: ends at"):
        read(FileSource(path), stored(bytes(9000)), [], check_all=True)


def test_a_file_system_without_direct_reading(tmp_path: Path) -> None:
    """Opens with O_DIRECT, then fails to read so: read through the page cache instead."""
    content = os.urandom(3 * BLOCK + 17)
    path = tmp_path / "x"
    path.write_bytes(content)
    source = FileSource(path)
    source._direct = True  # also where the file system under the test has none
    real, calls = os.preadv, []

    def refuse_once(fd: int, buffers: list[memoryview], offset: int) -> int:
        calls.append(offset)
        if len(calls) == 1:
            raise OSError(22, "Invalid argument")
        return real(fd, buffers, offset)

    with mock.patch.object(os, "preadv", refuse_once):
        found = read(source, stored(content), leaves([], len(content)), check_all=True)
    assert found["l0"] == content and len(calls) > 1


def test_a_disk_that_cannot_be_read_is_damage_with_a_name(tmp_path: Path) -> None:
    """A real EIO: the first page of this process's own memory is not there."""
    path = tmp_path / "x"
    path.write_bytes(bytes(100))
    source = FileSource(path)
    memory = os.open("/proc/self/mem", os.O_RDONLY)
    os.dup2(memory, source._open[0])
    os.close(memory)
    source._open = (source._open[0], False)
    with pytest.raises(DamagedError, match="x: cannot be read: Input/output error"):
        read(source, stored(bytes(100)), [], check_all=True)
