"""Images become files: every size and setting, while they are filled, on errors, and without direct I/O."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from stepwell.agent.files import buffered as cache
from stepwell.agent.files.tuning import Setting
from stepwell.agent.files.writer import Writer, copy_file, digest_image
from stepwell.agent.files.writer_threads import Pool
from stepwell.agent.pending import AbandonedError
from stepwell.handover.memory import Arena, ArenaShape, whole_pages
from stepwell.storage.format.checksum import BLOCK_BYTES, block_digest
from stepwell.storage.store import files
from stepwell.storage.store.background import NICE

MIB = 1 << 20
MOST_BYTES = 5 * BLOCK_BYTES + 4097
SETTINGS = [Setting(threads, size * MIB) for threads in (1, 2, 4) for size in (1, 4, 16)]


@pytest.fixture(scope="module")
def image() -> Iterator[memoryview]:
    arena = Arena.allocate(ArenaShape(1, 1, whole_pages(MOST_BYTES), 0))
    view = arena.image(0, arena.shape.slot_bytes)
    view[:] = random.Random(3).randbytes(len(view))
    yield view
    view.release()
    arena.close()


def expected(image: memoryview, nbytes: int) -> tuple[str, ...]:
    return tuple(
        block_digest(image[start : min(nbytes, start + BLOCK_BYTES)]) for start in range(0, nbytes, BLOCK_BYTES)
    )


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_every_setting_writes_the_same_bytes(setting: Setting, image: memoryview, tmp_path: Path) -> None:
    writer = Writer()
    writer.tuner.use(setting, 1e9)
    for nbytes in (1, 4096, MIB + 1, BLOCK_BYTES, 2 * BLOCK_BYTES - 1, MOST_BYTES):
        assert writer.write(tmp_path / "x", image, nbytes) == expected(image, nbytes)
        assert (tmp_path / "x").read_bytes() == bytes(image[:nbytes])


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_bytes_are_read_when_they_are_final(setting: Setting, image: memoryview, tmp_path: Path) -> None:
    arena = Arena.allocate(ArenaShape(1, 1, whole_pages(MOST_BYTES), 0))
    target, final, more = arena.image(0, arena.shape.slot_bytes), [0], threading.Condition()

    def arrive(nbytes: int) -> float:
        with more:
            assert more.wait_for(lambda: final[0] >= nbytes, 30)
        return 0.001

    def fill() -> None:
        while final[0] < MOST_BYTES:
            end = min(MOST_BYTES, final[0] + MIB // 2 + 77)
            target[final[0] : end] = image[final[0] : end]
            with more:
                final[0] = end
                more.notify_all()

    writer = Writer()
    writer.tuner.use(setting, 1e9)
    filler = threading.Thread(target=fill)
    filler.start()
    assert writer.write(tmp_path / "x", target, MOST_BYTES, arrive) == expected(image, MOST_BYTES)
    filler.join()
    assert (tmp_path / "x").read_bytes() == bytes(image[:MOST_BYTES])
    target.release()
    arena.close()


@pytest.mark.parametrize("error", [AbandonedError(), OSError(errno.EIO, "no")])
def test_an_error_ends_all_threads_and_leaves_no_file(error: Exception, image: memoryview, tmp_path: Path) -> None:
    calls = []

    def arrive(nbytes: int) -> float:
        calls.append(nbytes)
        if nbytes > 2 * BLOCK_BYTES:
            raise error
        return 0.0

    writer = Writer()
    with pytest.raises(type(error)):
        writer.write(tmp_path / "x", image, MOST_BYTES, arrive)
    assert not [*tmp_path.iterdir()] and max(calls) == 3 * BLOCK_BYTES
    assert writer.write(tmp_path / "x", image, MOST_BYTES) == expected(image, MOST_BYTES)  # its threads live


def is_cached(path: Path) -> bool:
    """Whether any page of a file is in the page cache."""
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        pages = ctypes.create_string_buffer(-(-len(memory) // 4096))
        where = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        assert ctypes.CDLL(None).mincore(ctypes.c_void_p(where), ctypes.c_size_t(len(memory)), pages) == 0
    return any(page & 1 for page in pages.raw)


def refuse_direct(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """As a file system that knows no O_DIRECT: at `open`, or only at `write`."""
    create, write_at = files.create, files.write_at

    def buffered(path: Path, *, direct: bool = False, reuse: bool = False) -> int:
        return create(path, reuse=reuse)

    def fussy(fd: int, data: memoryview, offset: int, path: Path) -> None:
        if not cache.BoundedCache(fd, path).is_buffered:
            raise OSError(errno.EINVAL, "not aligned as I like it")
        write_at(fd, data, offset, path)

    monkeypatch.setattr(files, *(("create", buffered) if where == "open" else ("write_at", fussy)))


@pytest.mark.parametrize("where", ["open", "write"])
def test_without_direct_io_little_is_dirty_and_nothing_stays_cached(
    where: str, image: memoryview, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_direct(monkeypatch, where)
    monkeypatch.setattr(cache, "MOST_DIRTY", 2 * BLOCK_BYTES)
    syncs, fdatasync = [], os.fdatasync
    monkeypatch.setattr(os, "fdatasync", lambda fd: syncs.append(fdatasync(fd)))
    assert Writer().write(tmp_path / "x", image, MOST_BYTES) == expected(image, MOST_BYTES)
    assert len(syncs) == 2
    assert not is_cached(tmp_path / "x")
    assert (tmp_path / "x").read_bytes() == bytes(image[:MOST_BYTES])
    assert is_cached(tmp_path / "x")  # the check can see cached pages


def test_a_users_file_does_not_stay_cached(image: memoryview, tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(image[:MOST_BYTES])
    assert copy_file(tmp_path / "source", tmp_path / "x") == (MOST_BYTES, expected(image, MOST_BYTES))
    assert not is_cached(tmp_path / "x")


def test_digests_in_memory(image: memoryview) -> None:
    for nbytes in (1, BLOCK_BYTES, MOST_BYTES):
        assert digest_image(image, nbytes) == expected(image, nbytes)


def test_the_pool_makes_way_for_training() -> None:
    """Its threads do; the one that waits for them, and answers the trainer, stays as it was."""
    pool, found = Pool(), []
    before = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    pool.run(lambda: found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id())), 2)
    assert set(found) == {max(before, NICE)}
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == before


def test_the_pool_runs_on_several_threads_and_keeps_them() -> None:
    pool, seen, meet = Pool(), set(), threading.Barrier(4)

    def work() -> None:
        meet.wait(30)
        seen.add(threading.get_ident())

    for _ in range(3):
        pool.run(work, 4)
    assert len(seen) == 4 and threading.get_ident() not in seen

    def fail() -> None:
        if meet.wait(30) == 2:
            raise KeyError("one of them")

    with pytest.raises(KeyError):
        pool.run(fail, 4)
