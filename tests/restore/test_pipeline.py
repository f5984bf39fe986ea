"""Blocks through threads into tensors: any layout, any number of threads, and never a byte of a bad block."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stepwell.errors import DamagedError
from stepwell.restore import byte_sources, verified_read
from stepwell.restore.byte_sources import BlockSource, FileSource, MemorySource
from stepwell.restore.into_tensors import Placing
from stepwell.restore.verified_read import read_file
from stepwell.storage.format.record import FileEntry, LeafEntry
from tests.restore.test_read import BLOCK, in_memory, leaves, stored

POISON = 0xA5
KINDS = ["file", "memory"]


class Opened:
    """A source of either kind over the same bytes, for so many threads."""

    def __init__(self, kind: str, content: bytes, threads: int, path: Path) -> None:
        self._memory = in_memory(content, before=4096)
        if kind == "file":
            path.write_bytes(content)
            self.source: BlockSource = type("Threaded", (FileSource,), {"threads": threads})(path)
        else:
            held = self._memory.__enter__()
            self.source = type("Threaded", (MemorySource,), {"threads": threads})(*held.__dict__.values())
        self._kind = kind

    def __enter__(self) -> BlockSource:
        return self.source

    def __exit__(self, *error: Any) -> None:
        self.source.close()
        if self._kind == "memory":
            self._memory.__exit__(None, None, None)


def poisoned(wanted: list[LeafEntry]) -> dict[str, torch.Tensor]:
    return {leaf.name: torch.full((leaf.end - leaf.start,), POISON, dtype=torch.uint8) for leaf in wanted}


def place(
    source: BlockSource,
    file: FileEntry,
    every: list[LeafEntry],
    tensors: dict[str, torch.Tensor],
    *,
    check_all: bool = True,
) -> int:
    with Placing(tensors) as placing:
        return read_file(source, file, every, placing, check_all=check_all)


def pattern(nbytes: int) -> bytes:
    """No two blocks alike, and never the poison."""
    return bytes((i * 7 + i // 251 + i // BLOCK) % POISON for i in range(nbytes))


@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.integers(1, 9 * BLOCK), st.integers(1, 8), st.sampled_from(KINDS), st.data())
def test_any_layout_arrives_bit_for_bit(
    tmp_path: Path, nbytes: int, threads: int, kind: str, data: st.DataObject
) -> None:
    content = pattern(nbytes)
    every = leaves(data.draw(st.lists(st.integers(0, nbytes), max_size=40)), nbytes)
    held = [leaf for leaf in every if data.draw(st.booleans())]
    tensors, check_all = poisoned(held), data.draw(st.booleans())
    with Opened(kind, content, threads, tmp_path / "x") as source:
        done = place(source, stored(content), every, tensors, check_all=check_all)
    assert done == nbytes
    for leaf in held:
        assert bytes(tensors[leaf.name].numpy()) == content[leaf.start : leaf.end], leaf.name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("threads", [1, 3, 8])
def test_a_damaged_block_in_any_place_is_refused_and_none_of_it_arrives(
    tmp_path: Path, kind: str, threads: int
) -> None:
    nbytes = 6 * BLOCK + 100
    content, every = pattern(nbytes), leaves([10, BLOCK - 1, BLOCK + 1, 3 * BLOCK, 4 * BLOCK + 7, nbytes - 1], nbytes)
    file = stored(content)
    for number in range(len(file.blocks)):
        start, end = number * BLOCK, min((number + 1) * BLOCK, nbytes)
        damaged = bytearray(content)
        damaged[(start + end) // 2] ^= 4
        tensors = poisoned(every)
        with (
            Opened(kind, bytes(damaged), threads, tmp_path / "x") as source,
            pytest.raises(DamagedError, match=f"bytes {start} to {end} have checksum") as caught,
        ):
            place(source, file, every, tensors)
        assert caught.value.fields["expected"] == file.blocks[number]
        assert caught.value.fields["path"] == source.label
        whole = b"".join(bytes(tensors[leaf.name].numpy()) for leaf in every)
        assert set(whole[start:end]) == {POISON}, f"block {number}"
        for other in range(len(file.blocks)):  # what did arrive is right
            found = whole[other * BLOCK : (other + 1) * BLOCK]
            assert set(found) == {POISON} or found == content[other * BLOCK : (other + 1) * BLOCK]


def test_control_without_the_check_a_damaged_block_arrives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verified_read, "_check", lambda *_: None)
    content, every = pattern(3 * BLOCK), leaves([], 3 * BLOCK)
    damaged = bytearray(content)
    damaged[BLOCK + 9] ^= 4
    tensors = poisoned(every)
    with Opened("memory", bytes(damaged), 2, tmp_path) as source:
        place(source, stored(content), every, tensors)
    assert bytes(tensors["l0"].numpy()) == damaged


def test_of_several_damaged_blocks_a_single_reader_names_the_first(tmp_path: Path) -> None:
    content = pattern(5 * BLOCK)
    damaged = bytearray(content)
    damaged[BLOCK] ^= 1
    damaged[3 * BLOCK] ^= 1
    with (
        Opened("memory", bytes(damaged), 1, tmp_path) as source,
        pytest.raises(DamagedError, match=f"bytes {BLOCK} to"),
    ):
        place(source, stored(content), [], {})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("most", [1, 511, 4096, 5000])
def test_reads_that_return_less_than_was_asked_for(tmp_path: Path, kind: str, most: int) -> None:
    content = pattern(3 * BLOCK + 17)
    every = leaves([5, BLOCK + 5], len(content))
    tensors, real = poisoned(every), os.preadv

    def short(fd: int, buffers: list[memoryview], offset: int) -> int:
        got = real(fd, buffers, offset)
        told = min(got, most)
        buffers[0][told:got] = bytes([POISON]) * (got - told)
        return told

    with Opened(kind, content, 4, tmp_path / "x") as source, mock.patch.object(os, "preadv", short):
        place(source, stored(content), every, tensors)
    assert b"".join(bytes(tensors[leaf.name].numpy()) for leaf in every) == content


@pytest.mark.parametrize("kind", KINDS)
def test_what_ends_early_is_damage_and_says_where(tmp_path: Path, kind: str) -> None:
    content = pattern(3 * BLOCK)
    with (
        Opened(kind, content[: BLOCK + 10], 1, tmp_path / "x") as source,
        pytest.raises(DamagedError, match=f"ends at {BLOCK + 10}") as caught,
    ):
        place(source, stored(content), [], {})
    assert caught.value.fields["found"] == BLOCK + 10


def test_direct_reading_that_is_refused_is_done_through_the_page_cache(tmp_path: Path) -> None:
    content = pattern(9 * BLOCK + 17)
    every = leaves([5, BLOCK + 5], len(content))
    tensors, real, refused = poisoned(every), os.preadv, []
    with Opened("file", content, 8, tmp_path / "x") as source:
        assert isinstance(source, FileSource)
        first = source._open[0]
        source._open = (first, True)  # also where the file system under the test has none

        def refuse(fd: int, buffers: list[memoryview], offset: int) -> int:
            if fd == first:
                refused.append(offset)
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            return real(fd, buffers, offset)

        with mock.patch.object(os, "preadv", refuse):
            place(source, stored(content), every, tensors)
    assert refused
    assert b"".join(bytes(tensors[leaf.name].numpy()) for leaf in every) == content


def test_what_the_receiver_raises_stops_all_threads_and_comes_back(tmp_path: Path) -> None:
    content = pattern(50 * BLOCK)
    before, calls = threading.active_count(), []

    def deliver(leaf: LeafEntry, offset: int, data: memoryview) -> None:
        calls.append(offset)
        raise KeyError("no room at the receiver's")

    with Opened("memory", content, 8, tmp_path) as source, pytest.raises(KeyError, match="no room"):
        read_file(source, stored(content), leaves([], len(content)), deliver, check_all=True)
    assert threading.active_count() == before and len(calls) <= 8


@pytest.mark.parametrize("allowed", [1, 3])
def test_where_threads_are_scarce_fewer_do_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, allowed: int
) -> None:
    content, real, started = pattern(9 * BLOCK), threading.Thread.start, []

    def start(thread: threading.Thread) -> None:
        if len(started) == allowed:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    tensors = poisoned(leaves([], len(content)))
    with Opened("memory", content, 8, tmp_path) as source:
        place(source, stored(content), leaves([], len(content)), tensors)
        assert bytes(tensors["l0"].numpy()) == content
        with pytest.raises(RuntimeError, match="can't start new thread"):
            place(source, stored(content), leaves([], len(content)), tensors)


def test_a_single_block_needs_no_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python may wait for ever for a thread that finds no memory to begin with."""
    monkeypatch.setattr(threading.Thread, "start", lambda _: pytest.fail("a thread"))
    content = pattern(BLOCK)
    tensors = poisoned(leaves([], BLOCK))
    with Opened("memory", content, 8, tmp_path) as source:
        place(source, stored(content), leaves([], BLOCK), tensors)
    assert bytes(tensors["l0"].numpy()) == content


@pytest.mark.parametrize("allowed", [0, 1])
def test_where_memory_is_scarce_one_room_is_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, allowed: int
) -> None:
    content, made = pattern(9 * BLOCK), []

    class Scarce(byte_sources.ReadBuffer):
        def __init__(self, nbytes: int, *, huge: bool = False) -> None:
            made.append(nbytes)
            if len(made) > allowed:
                raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
            super().__init__(nbytes, huge=huge)

    monkeypatch.setattr(verified_read, "ReadBuffer", Scarce)
    found = bytearray(len(content))

    def deliver(leaf: LeafEntry, offset: int, data: memoryview) -> None:
        found[offset : offset + len(data)] = data

    with Opened("memory", content, 4, tmp_path) as source:
        if allowed:
            read_file(source, stored(content), leaves([], len(content)), deliver, check_all=True)
            assert found == content
        else:
            with pytest.raises(OSError, match="Cannot allocate memory"):
                read_file(source, stored(content), leaves([], len(content)), deliver, check_all=True)


def test_memory_is_bounded_whatever_the_record_says_of_block_sizes(tmp_path: Path) -> None:
    """The largest blocks that a record may have: one thread, one room."""
    content = pattern(BLOCK)
    file = FileEntry("x", "opaque", 3 * (64 << 20), 64 << 20, stored(content).blocks * 3)
    with (
        Opened("memory", content, 8, tmp_path) as source,
        mock.patch.object(verified_read, "ReadBuffer", wraps=byte_sources.ReadBuffer) as made,
        pytest.raises(DamagedError, match=f"ends at {BLOCK}"),
    ):
        read_file(source, file, [], lambda *_: None, check_all=True)
    assert made.call_count == 1


def test_an_interrupted_wait_ends_the_threads_first(tmp_path: Path) -> None:
    """Ctrl-C comes to the caller only when nobody reads from its files any more."""
    content = pattern(50 * BLOCK)
    entered, go_on = threading.Event(), threading.Event()
    before, real = threading.active_count(), threading.Thread.join

    def deliver(leaf: LeafEntry, offset: int, data: memoryview) -> None:
        entered.set()
        assert go_on.wait(60)

    def interrupted(thread: threading.Thread, timeout: float | None = None) -> None:
        if not go_on.is_set():
            assert entered.wait(60)
            go_on.set()
            raise KeyboardInterrupt
        real(thread, timeout)

    with (
        Opened("memory", content, 2, tmp_path) as source,
        mock.patch.object(threading.Thread, "join", interrupted),
        pytest.raises(KeyboardInterrupt),
    ):
        read_file(source, stored(content), leaves([], len(content)), deliver, check_all=True)
    assert threading.active_count() == before
